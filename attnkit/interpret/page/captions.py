"""The section of a caption: its words, where the model looked for each, and how far to trust it."""

from collections.abc import Sequence
from typing import Annotated, Any

from torch import Tensor

from attnkit.interpret.colours import as_numbers, overlay_scale
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.page.html import colour_bar, escaped, image_uri, map_uri, short
from attnkit.interpret.page.section import Section
from attnkit.interpret.trust.words import WordScore


def caption_section(
    title: str,
    picture: Annotated[Tensor, "channels height width"],
    seen: Explanation,
    words: Sequence[str],
    scores: Sequence[WordScore] | None = None,
    *,
    over_chance: Sequence[float | None] = (),
    image: int = 0,
) -> Section:
    """The words of a caption, each with its map over the image in light tones.

    All maps of the sentence have one scale, whose numbers are beside it, and are not enlarged by
    interpolation. With scores, each word has its gap, its probability and what is left of it
    without the region that its map ranks first; a map no better than random is faded and says so.

    Args:
        title: plain text.
        picture: the image, of any range.
        seen: what `attnkit.explain` says of a captioner.
        words: of the sentence, the end too.
        scores: of each of them: `seen.trust_words().scores[image]`.
        over_chance: of each of them, where the object that it names is known, how many times chance
            the map is on it.
        image: which of the explained.

    Raises:
        ValueError: other numbers of words or scores; an explanation without words.
    """
    if seen.words is None:
        raise ValueError("seen: expected an explanation of a captioner, which has words")
    if len(words) > seen.words.shape[1]:
        raise ValueError(f"words: expected at most {seen.words.shape[1]}, got {len(words)}")
    if scores is not None and len(scores) != len(words):
        raise ValueError(f"scores: expected one for each of {len(words)} words, got {len(scores)}")
    maps = as_numbers(seen.words[image, : len(words)])
    scale = overlay_scale(maps, is_signed=seen.is_signed)
    columns = maps.shape[2]
    height, width = picture.shape[-2:]
    cards, told = [], []
    for number, (word, values) in enumerate(zip(words, maps, strict=True)):
        score = scores[number] if scores else None
        row, column = divmod(int(values.argmax()), columns)
        alt = f"{word}: largest, {short(values[row, column])}, at row {row}, column {column}"
        lines = [] if score is None else _lines(score)
        over = over_chance[number] if over_chance else None
        lines += [] if over is None else [f"{short(over)} × chance on what it names"]
        faded = score is not None and not score.is_better
        cards.append(_card(word, map_uri(values, scale), alt, lines, faded))
        told.append(_data(word, values, score))
    frame = f"--picture:url({image_uri(picture)});--shape:{width}/{height}"
    html = f"""<div class="caption" style="{escaped(frame)}">
<div class="chosen">
<div class="frame large" role="group" aria-label="The image; arrow keys choose a region">
<span class="base"></span><img class="map" src="{_NOTHING}" alt="">
<span class="region" hidden></span></div>
<div class="about">
<p>{escaped(_summary(words, scores))}</p>
{colour_bar(scale, f"{seen.method}, one scale for all words")}
<p class="said screen" aria-live="polite">Hover or focus a word to see it large, or a region of the
image to see which words looked at it.</p>
</div></div>
<ol class="words">
{"".join(cards)}</ol></div>"""
    data = {"rows": maps.shape[1], "columns": columns, "words": told}
    return Section(title, html, data, "caption")


_NOTHING = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="  # 1 pixel


def _card(word: str, uri: str, alt: str, lines: Sequence[str], is_faded: bool) -> str:
    faded = " faded" if is_faded else ""
    numbers = "".join(f'<span class="line">{escaped(line)}</span>' for line in lines)
    return (
        f'<li class="word{faded}"><button type="button">'
        f'<span class="frame"><span class="base"></span>'
        f'<img class="map" src="{uri}" alt="{escaped(alt)}"></span>'
        f'<span class="name">{escaped(word)}</span></button>'
        f'{numbers}<span class="line here screen"></span></li>\n'
    )


def _lines(score: WordScore) -> list[str]:
    verdict = "better than random" if score.is_better else "no better than random"
    return [
        f"p {score.probability:.2f}, without its first region {score.without:.2f}",
        f"gap {score.gap:.2f}".replace("-", "−"),
        f"{verdict} ({score.within:.2f})",
    ]


def _summary(words: Sequence[str], scores: Sequence[WordScore] | None) -> str:
    sentence = " ".join(word for word in words if not word.startswith("<"))
    if scores is None:
        return f"“{sentence}”. How far to trust the maps was not measured."
    better = sum(score.is_better for score in scores)
    return (
        f"“{sentence}”. The maps of {better} of {len(words)} words are better than random: what "
        "their p loses where the map points, the gap, is more than for 19 random maps in 20, whose "
        "bound stands in brackets. The others are faded. Regions taken away get the image's mean "
        "colour."
    )


def _data(word: str, values: Any, score: WordScore | None) -> dict[str, Any]:
    found: dict[str, Any] = {"word": word, "values": _rounded(values)}
    if score is not None:
        found["p"] = float(f"{score.probability:.3g}")
        found["without"] = _rounded(score.without_each)
        found["first"] = list(score.first)
        found["random"] = float(f"{score.without_random:.3g}")
    return found


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.3g}") for value in as_numbers(values).flatten()]
