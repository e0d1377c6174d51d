"""Sentences of a captioner: a row for each method and word, and a part of the page for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.page.captions import caption_section
from attnkit.interpret.report.asked import Asked, Step
from attnkit.interpret.report.findings import Findings, Row, number
from attnkit.interpret.trust.words import WordScore, WordTrust
from attnkit.lightning.explained import Explained
from attnkit.metrics.localisation import area, mass

_CAPTION = (
    "gap: what a word's probability loses where its map points rather than elsewhere. A random "
    "map's gap is below the limit 19 times in 20; the words above it are better than random."
)
_OF_OBJECTS = (
    " mass over chance: of words whose object is known, what of their map is there; 1: even."
)


def explain_sentences(asked: Asked, explained: Explained, step: Step) -> Findings:
    """Where each method says that the captioner looked at each word, and how far to trust it."""
    seen: dict[str, Explanation] = {}
    judged: dict[str, WordTrust] = {}
    for method in asked.methods:
        step(method)
        seen[method] = explain(explained.model, explained.inputs, explained.sentences, method)
        if asked.trust != "none":
            step(f"{method}: how far to trust it")
            judged[method] = seen[method].trust_words(
                full=asked.is_full, batch_size=asked.batch_size, seed=asked.seed
            )
    rows = [
        row for method in seen for row in _rows(method, explained, seen[method], judged.get(method))
    ]
    first = asked.methods[0]
    return Findings(
        rows,
        _arrays(explained, seen),
        sections=_sections(explained, seen[first], judged.get(first)),
        shown=_shown(asked, rows),
        caption=(_CAPTION if judged else "") + (_OF_OBJECTS if any(explained.named) else ""),
        said=[f"{method}: {trust}" for method, trust in judged.items()],
    )


def _rows(
    method: str, explained: Explained, seen: Explanation, trust: WordTrust | None
) -> list[Row]:
    rows: list[Row] = []
    for image, words in enumerate(explained.words):
        for place, word in enumerate(words):
            row: dict[str, Any] = {
                "map": method,
                "image": explained.name(image),
                "place": place,
                "word": word,
                "probability": float(seen.probability[image, place]),
            }
            if trust is not None:
                row |= _of(trust.scores[image][place])
            row["mass_over_chance"] = _over_chance(explained, seen, image, place)
            rows.append(row)
    return rows


def _over_chance(explained: Explained, seen: Explanation, image: int, place: int) -> float | None:
    """Of a word whose object is known, what of its map is there over the object's area."""
    mask = explained.named[image].get(place) if explained.named else None
    if mask is None or not mask.any():
        return None
    assert seen.words is not None
    return float(mass(seen.words[image, place][None], mask[None]) / area(mask[None]))


def _of(score: WordScore) -> dict[str, Any]:
    return {
        "gap": score.gap,
        "gap_random": score.within,
        "verdict": f"{'better' if score.is_better else 'no better'} than random",
        "first_row": score.first[0],
        "first_column": score.first[1],
        "probability_without_first": score.without,
        "probability_without_random": score.without_random,
    }


def _shown(asked: Asked, rows: list[Row]) -> list[list[str]]:
    """A row for each method: means over all words."""
    has_truth = any(row["mass_over_chance"] is not None for row in rows)
    table = [["map", "words", "mean p", "gap", "limit", "words better\nthan random"]]
    table[0] += ["mass over\nchance"] if has_truth else []
    for method in asked.methods:
        own = [row for row in rows if row["map"] == method]
        means = [_mean(own, name) for name in ("probability", "gap", "gap_random")]
        better = sum(str(row.get("verdict", "")).startswith("better") for row in own)
        share = f"{better} of {len(own)}" if means[1] is not None else ""
        cells = [method.replace("_", " "), str(len(own)), *map(number, means), share]
        over = [number(_mean(own, "mass_over_chance"))] if has_truth else []
        table.append([*cells, *over])
    return table


def _mean(rows: list[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _sections(explained: Explained, seen: Explanation, trust: WordTrust | None) -> list[Any]:
    assert explained.pictures is not None
    return [
        caption_section(
            f"{explained.name(image)}: {' '.join(words)}",
            explained.pictures[image],
            seen,
            words,
            trust.scores[image] if trust else None,
            over_chance=[
                _over_chance(explained, seen, image, place) for place in range(len(words))
            ],
            image=image,
        )
        for image, words in enumerate(explained.words)
    ]


def _arrays(explained: Explained, seen: dict[str, Explanation]) -> dict[str, np.ndarray]:
    """Maps [images, words, rows, columns] by method, and the words."""
    arrays: dict[str, Any] = {}
    for method, one in seen.items():
        assert one.words is not None
        arrays[f"map_{method}"] = one.words.cpu().numpy()
    assert explained.sentences is not None
    arrays["sentences"] = explained.sentences.cpu().numpy()
    longest = max(map(len, explained.words), default=0)
    arrays["words"] = np.array([[*w, *[""] * (longest - len(w))] for w in explained.words])
    return arrays
