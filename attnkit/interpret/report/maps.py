"""Page sections with maps: of images by several methods, or of a caption's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.question import logits_of, looking
from attnkit.interpret.picture import Scale, as_numbers, overlay_scale, scale_of
from attnkit.interpret.report.attention import (
    attention_of,
    heads_data,
    looks_data,
    patch_data,
    without_each,
)
from attnkit.interpret.report.findings import Judged, number
from attnkit.interpret.report.page import Section, colour_bar, image_uri, map_uri, short
from attnkit.interpret.trust.curves import gaps_of
from attnkit.interpret.trust.removal import REMOVALS
from attnkit.interpret.trust.result import Fall, Trust, verdict
from attnkit.lightning.protocols import Explained
from attnkit.metrics.maps import area, mass


class _Maps(NamedTuple):
    """Maps [batch, rows, columns] that share a scale, for a figure of each image.

    unit: meaning of the scale's numbers.
    says: text below the map of each image.
    """

    title: str
    values: Tensor
    scale: Scale
    unit: str
    says: Sequence[str]

    def figure(self, image: int) -> dict[str, Any]:
        """Return the data of one image's figure, for the template."""
        count = len(self.values)
        unit = self.unit if count == 1 else f"{self.unit}; one scale for {count} images"
        bar = colour_bar(self.scale, unit)
        return _figure(self.title, self.values[image], self.scale, self.says[image], bar=bar)


def image_sections(
    explained: Explained, found: Sequence[Judged], batch_size: int = 64
) -> list[Section]:
    """Return a section for each image of a batch: its maps, curves, patches and heads.

    Each method's maps have one scale for all images, so that they can be compared by eye. Patches
    and heads are shown for the class that the first method explains. This takes a forward for each
    patch, in batches of `batch_size` images.
    """
    first = found[0].seen
    names = [explained.class_name(int(target)) for target in first.target]
    shown, notes, attention = _shown(explained, found), [], None
    try:
        attention = attention_of(first)
    except (ValueError, RuntimeError) as error:
        notes.append(f"Not shown: what patches look at, layers and heads. {_reason(error)}")
    without = without_each(first, attention.grid if attention else None, batch_size)
    drop = (without.whole[:, None] - without.p).unflatten(1, without.grid)
    says = []
    for target, whole, each in zip(names, without.whole, without.p, strict=True):
        p, low, high = (number(float(one)) for one in (whole, *each.aminmax()))
        said = f"p({target}) is {p}, and without one patch {low} to {high} ({without.kind})."
        says.append(said)
    scale = scale_of([drop], is_signed=True)
    shown.append(_Maps("Each patch removed", drop, scale, "what p loses", says))
    sections = []
    for image, target in enumerate(names):
        looks = looks_data(attention, image) if attention and attention.looks else None
        sees = "what it looks at; " if looks else ""
        section = _section(explained.name(image), first.images[image])
        section |= {
            "caption": _prediction(explained, first, image),
            "figures": [maps.figure(image) for maps in shown],
            "hint": f"Point at a patch, or press Tab and arrow keys: {sees}click or press Enter: p "
            "without it.",
            "looks": looks,
            "curves": patch_curves({j.method: j.trust for j in found if j.trust}, image, target),
            "said": [
                {"title": one.method, "sentences": patch_sentences(one.trust, image)}
                for one in found
                if one.trust
            ],
            "heads": heads_data(attention, image) if attention else None,
            "notes": notes,
            "data": patch_data(without, image, target) | {"looks": looks and looks["layers"]},
        }
        sections.append(section)
    return sections


def word_sections(explained: Explained, found: Sequence[Judged]) -> list[Section]:
    """Return a section for each sentence: its words, each with its map on the light image.

    All maps of a sentence have one scale. A judged word shows its gap, its probability, and its
    probability without the region that its map ranks first. A map that is no better than random is
    faded and labelled so.
    """
    seen, trust = found[0].seen, found[0].trust
    assert explained.pictures is not None
    sections = []
    for image, words in enumerate(explained.words):
        scores = trust.scores[image] if trust else [None] * len(words)
        maps = as_numbers(seen.words[image, : len(words)])
        scale = overlay_scale(maps, is_signed=seen.is_signed)
        figures, data_of_words = [], []
        over = over_chance(explained, seen, image)
        for word, values, score, times in zip(words, maps, scores, over, strict=True):
            lines = _word_lines(score) if score else [_largest(values)]
            if times is not None:
                lines.append(f"{short(times)} × chance on what it names")
            is_faded = bool(score) and not score.is_better
            figures.append(_figure(word, values, scale, _largest(values), lines, faded=is_faded))
            data = {"word": word, "values": _rounded(values)}
            if score:
                data |= {"p": score.probability, "without": _rounded(score.without_each)}
            data_of_words.append(data)
        section = _section(f"{explained.name(image)}: {' '.join(words)}", explained.pictures[image])
        section |= {
            "overlay": True,
            "bar": colour_bar(scale, f"{seen.method}, one scale for all words"),
            "caption": _sentence(words, trust and scores),
            "figures": figures,
            "hint": "Point at a region, or press Tab and arrow keys: which words looked at it.",
            "data": {"rows": maps.shape[1], "columns": maps.shape[2], "words": data_of_words},
        }
        sections.append(section)
    return sections


def over_chance(explained: Explained, seen: Any, image: int) -> list[float | None]:
    """Return for each word the share of its map on its object over the object's area.

    It is None for a word whose object is not known.
    """
    known = explained.named[image] if explained.named else {}
    found: list[float | None] = []
    for values, place in zip(seen.words[image], range(len(explained.words[image])), strict=False):
        mask = known.get(place)
        if mask is None or not mask.any():
            found.append(None)
        else:
            found.append(float(mass(values[None], mask[None]) / area(mask[None])))
    return found


def _section(title: str, picture: Tensor) -> dict[str, Any]:
    """Return the data of every section of maps, with empty values for optional parts."""
    left_out = {"overlay": False, "bar": None, "looks": None, "heads": None}
    return left_out | {
        "kind": "maps",
        "title": title,
        "picture": image_uri(picture),
        "shape": f"{picture.shape[-1]} / {picture.shape[-2]}",
        "curves": [],
        "said": [],
        "notes": [],
    }


def _figure(
    title: str, values: Any, scale: Scale, says: str, lines: Sequence[str] = (), **given: Any
) -> dict[str, Any]:
    """Return the data of a map's figure; without `lines`, its description is the text below it."""
    figure = {"title": title, "uri": map_uri(values, scale), "alt": f"Map: {title}. {says}"}
    return {**figure, "bar": None, "faded": False, "lines": list(lines) or [says], **given}


def _shown(explained: Explained, found: Sequence[Judged]) -> list[_Maps]:
    """Return the maps of each method, then the maps that the first is compared with, and the
    differences."""
    first = found[0].seen
    beside: dict[str, Explanation] = {}
    if found[0].other is not None:
        beside["the other checkpoint"] = found[0].other
    if first.has_target:
        beside["another class"] = _of_another_class(explained, first)

    def maps(name: str, one: Explanation, scale: Scale) -> _Maps:
        says = [_about(explained, one, image) for image in range(len(one.map))]
        return _Maps(name, one.map, scale, one.method, says)

    both = scale_of(
        [first.map, *(other.map for other in beside.values())], is_signed=first.is_signed
    )
    shown = [maps(found[0].method, first, both)]
    for one in found[1:]:
        scale = scale_of([one.seen.map], is_signed=one.seen.is_signed)
        shown.append(maps(one.method, one.seen, scale))
    for name, other in beside.items():
        difference = first.map - other.map
        scale = scale_of([difference], is_signed=True)
        says = [f"{first.method} minus that of {name}; red: more in the first."] * len(difference)
        shown.append(maps(name, other, both))
        shown.append(_Maps(f"minus {name}", difference, scale, "difference", says))
    return shown


def _of_another_class(explained: Explained, seen: Explanation) -> Explanation:
    """Explain the likeliest other class by the same method."""
    with looking(explained.model), torch.no_grad():
        logits = logits_of(explained.model(explained.inputs)).clone()
    logits.scatter_(1, seen.target[:, None], -torch.inf)
    return explain(explained.model, explained.inputs, logits.argmax(dim=1), seen.method)


def _about(explained: Explained, one: Explanation, image: int) -> str:
    text = "The same for every class. "
    if one.has_target:
        name, p = explained.class_name(int(one.target[image])), float(one.probability[image])
        text = f"For {name}, p = {number(p)}. "
    text += _largest(as_numbers(one.map[image]))
    if one.share is not None:
        text += f" Class and register tokens took {100 * float(one.share[image]):.0f} %."
    return text


def _largest(values: Any) -> str:
    rows, columns = values.shape
    row, column = divmod(int(values.argmax()), columns)
    where = f"row {row}, column {column} of {rows} × {columns}"
    return f"Largest {short(float(values[row, column]))} at {where}."


def _prediction(explained: Explained, first: Explanation, image: int) -> str:
    target, predicted = int(first.target[image]), int(first.predicted[image])
    text = f"Predicted: {explained.class_name(predicted)}"
    if target != predicted:
        text += f"; explained: {explained.class_name(target)}"
    text += f", p = {number(float(first.probability[image]))}"
    if explained.truth is not None:
        text += f"; label: {explained.class_name(int(explained.truth[image]))}"
    return f"{text}."


def _reason(error: Exception) -> str:
    """Return an error's message as a sentence, without its advice."""
    text = str(error).partition("; ")[0].partition(", or take another method")[0]
    text = text.removeprefix("model: ")
    return f"{text[:1].upper()}{text[1:]}."


def _word_lines(score: Any) -> list[str]:
    verdict = "better than random" if score.is_better else "no better than random"
    return [
        f"p {number(score.probability)}, without its first region {number(score.without)}",
        f"gap {short(score.gap)}",
        f"{verdict} ({short(score.within)})",
    ]


def _sentence(words: Sequence[str], scores: Sequence[Any] | None) -> str:
    sentence = " ".join(word for word in words if not word.startswith("<"))
    if not scores:
        return f"“{sentence}”. How far to trust the maps was not measured."
    better = sum(score.is_better for score in scores)
    return (
        f"“{sentence}”. The maps of {better} of {len(words)} words are better than random: what "
        "their p loses where the map points, the gap, is more than for 19 random maps in 20, whose "
        "bound stands in brackets. The others are faded. Regions taken away get the image's mean "
        "colour."
    )


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.3g}") for value in as_numbers(values).flatten()]


_COLOURS = 6  # number of line colours in the style sheet


def patch_curves(trusts: Mapping[str, Trust], image: int, target: str) -> list[dict[str, Any]]:
    """Return the data of a figure for each kind of removal: p against the removed share.

    Args:
        trusts: trust by the name of the map.
        image: index of the image in the batch.
        target: name of the class.
    """
    figures = []
    for kind in dict.fromkeys(kind for trust in trusts.values() for kind in trust.curves):
        of_kind = {name: trust for name, trust in trusts.items() if kind in trust.curves}
        first = next(iter(of_kind.values()))
        xs = first.removed.tolist()
        random = first.curves[kind]["random"][:, image]
        lines, legend = [], []
        for place, (name, trust) in enumerate(of_kind.items()):
            colour = f"c{place % _COLOURS}"
            most, least = trust.curves[kind]["map"][:, image]
            lines += [
                {"style": f"{colour} solid", "points": _points(xs, most)},
                {"style": f"{colour} dashed", "points": _points(xs, least)},
            ]
            legend.append({"style": f"{colour} solid", "name": name})
        figures.append(
            {
                "title": f"Patches removed: {REMOVALS[kind]}",
                "alt": f"p({target}) against the share of patches removed, {REMOVALS[kind]}",
                "y": f"p({target if len(target) < 16 else target[:14] + '…'})",
                "x": "patches removed",
                "ticks": [(x, f"{100 * x:.0f} %") for x in (0, 0.5, 1)],
                "band": [*_points(xs, random.amin(dim=0)), *_points(xs, random.amax(dim=0))[::-1]],
                "lines": lines,
                "legend": [*legend, {"style": "band", "name": f"{len(random)} random orders"}],
                "note": "Solid: highest-ranked patches first; dashed: lowest-ranked first.",
            }
        )
    return figures


def patch_sentences(trust: Trust, image: int) -> list[tuple[str, str]]:
    """Return two sentences for each kind of removal: what the image loses where the map points, and
    whether that is more than for a random map."""
    sentences = []
    for kind, curves in trust.curves.items():
        one = {name: values[:, image : image + 1] for name, values in curves.items()}
        gaps, within = gaps_of(one, trust.removed)
        gap = float(gaps["map"])
        lost = Fall.at(trust.falls[kind].share, trust.removed, one)
        # mean ± two standard errors may leave the range of a probability
        lost = lost._replace(low=max(0.0, lost.low), high=min(1.0, lost.high))
        better = verdict("random", gap > within)
        judged = f"Gap {gap:.2f}, random maps 0 ± {within:.2f}: {better}.".replace("-", "−")
        sentences.append((lost.sentence(kind, 1), judged))
    return sentences


def _points(xs: Sequence[float], ys: Tensor) -> list[tuple[float, float]]:
    """Return the points of a curve, from 0 to 1 in both directions."""
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
