"""Images: a row for each method, judged over all of them, and a part of the page for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attnkit.interpret.explain import explain
from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.question import logits_of, looking
from attnkit.interpret.methods.table import METHODS
from attnkit.interpret.page.images import image_sections
from attnkit.interpret.report.asked import Asked, Step
from attnkit.interpret.report.findings import Findings, Row, number
from attnkit.interpret.trust.agreement import spearman
from attnkit.interpret.trust.result import Trust
from attnkit.lightning.explained import Explained

# columns of scores.csv, and what `Trust` calls them
_GAPS = {"mask": "gap in p, tokens masked", "mean": "gap in p, mean colour"}
_SCORES = {
    "class_sensitivity": "class sensitivity",
    "similarity_random_weights": "similarity, all weights random",
    "similarity_another_image": "similarity, another image",
    "pointing": "pointing",
    "mass_over_chance": "mass over chance",
}
_SANITY = ("class_sensitivity", "similarity_random_weights", "similarity_another_image")
_CONTROLS = ("random", "centre", "input_gradient", "oracle")
_SHOWN = {
    "class\nsensitivity": "class_sensitivity",
    "random\nweights": "similarity_random_weights",
    "mass over\nchance": "mass_over_chance",
}
_CAPTION = (
    "gap ±: two standard errors of random maps. class sensitivity 0: the same map for every class. "
    "random weights: a rank correlation."
)


def explain_images(
    asked: Asked, explained: Explained, against: Explained | None, step: Step
) -> Findings:
    """What each method says of the images, and how far to trust it."""
    seen: dict[str, Explanation] = {}
    other: dict[str, Explanation] = {}
    judged: dict[str, Trust] = {}
    for method in asked.methods:
        step(method)
        seen[method] = explain(explained.model, explained.inputs, asked.target, method)
        if against is not None:
            other[method] = _against(against, seen[method])
        if asked.trust != "none":
            step(f"{method}: how far to trust it")
            judged[method] = seen[method].trust(
                full=asked.is_full,
                masks=explained.masks,
                batch_size=asked.batch_size,
                seed=asked.seed,
            )
    rows: list[Row] = [
        _row(method, seen[method], judged.get(method), other.get(method)) for method in seen
    ]
    rows += _controls(next(iter(judged.values()), None), seen)
    step("the page")
    return Findings(
        rows,
        _arrays(seen, judged, other),
        sections=_sections(asked, explained, seen, judged, other),
        shown=_shown(rows),
        caption=_CAPTION if judged else "",
        said=[f"{method}: {trust}" for method, trust in judged.items()],
    )


def _sections(
    asked: Asked,
    explained: Explained,
    seen: Mapping[str, Explanation],
    judged: Mapping[str, Trust],
    other: Mapping[str, Explanation],
) -> list[Any]:
    """A part of the page for each image."""
    first = asked.methods[0]
    beside = {"the other checkpoint": other[first]} if first in other else {}
    if METHODS[first].has_target:
        beside |= {"another class": _of_another_class(explained, seen[first])}
    labels = None if explained.truth is None else explained.truth.tolist()
    return image_sections(
        list(seen.values()),
        [judged.get(method) for method in seen],
        titles=[explained.name(number) for number in range(len(seen[first].map))],
        labels=labels,
        class_names=explained.class_names,
        against=beside,
        batch_size=asked.batch_size,
    )


def _of_another_class(explained: Explained, seen: Explanation) -> Explanation:
    """The same method for the likeliest of the other classes."""
    with looking(explained.model), torch.no_grad():
        logits = logits_of(explained.model(explained.inputs)).clone()
    logits.scatter_(1, seen.target[:, None], -torch.inf)
    return explain(explained.model, explained.inputs, logits.argmax(dim=1), seen.method)


def _against(against: Explained, seen: Explanation) -> Explanation:
    """The same classes of the same images, of another model."""
    method = seen.method
    target = seen.target if METHODS[method].has_target else None
    other = explain(against.model, against.inputs, target, method)
    if other.map.shape != seen.map.shape:
        ours, theirs = (" x ".join(map(str, one.map.shape[1:])) for one in (seen, other))
        raise ValueError(
            f"against: its maps are {theirs}, the first model's {ours}; expected the same grid"
        )
    return other


def _row(
    method: str, seen: Explanation, trust: Trust | None, other: Explanation | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"map": method, "images": len(seen.map)}
    row |= _of(trust, "map")
    for kind, words in (trust.verdicts if trust else {}).items():
        row[f"verdict_{kind}"] = "; ".join(words)
    if seen.share is not None and seen.num_prefix_tokens:
        row["prefix_share"] = float(seen.share.mean())
    if other is not None:
        row["spearman_against"] = float(spearman(seen.map, other.map).mean())
    return row


def _of(trust: Trust | None, whose: str) -> dict[str, float | None]:
    """The scores of the map, or of what it is held against."""
    known = {score.name: score for score in trust.scores} if trust else {}
    found: dict[str, float | None] = {}
    for kind, name in _GAPS.items():
        if name in known:
            found[f"gap_{kind}"] = getattr(known[name], whose)
            found[f"gap_{kind}_random"] = known[name].within
    for column, name in _SCORES.items():
        if name in known:
            found[column] = getattr(known[name], whose)
    return found


def _controls(trust: Trust | None, seen: Mapping[str, Explanation]) -> list[Row]:
    """What every map is held against, as far as it is not one of the maps."""
    if trust is None:
        return []
    rows = [{"map": name, "images": trust.num_images, **_of(trust, name)} for name in _CONTROLS]
    for name in _SANITY:  # two random maps differ, but the one that is shown depends on nothing
        rows[0].pop(name, None)
    return [
        row
        for row in rows
        if row["map"] not in seen and any(row.get(f"gap_{kind}") is not None for kind in _GAPS)
    ]


def _shown(rows: list[Row]) -> list[list[str]]:
    """Headings and cells of the table on the screen."""
    kinds = [kind for kind in _GAPS if any(row.get(f"gap_{kind}") is not None for row in rows)]
    shown = {
        heading: name
        for heading, name in {**_SHOWN, "other\nmodel": "spearman_against"}.items()
        if any(row.get(name) is not None for row in rows)
    }
    headings = {"mask": "gap, tokens\nmasked", "mean": "gap, mean\ncolour"}
    table = [["map", *(headings[kind] for kind in kinds), *shown]]
    for row in rows:
        gaps = [number(row.get(f"gap_{kind}"), row.get(f"gap_{kind}_random")) for kind in kinds]
        name = str(row["map"]).replace("_", " ")
        table.append([name, *gaps, *(number(row.get(name)) for name in shown.values())])
    return table


def _arrays(
    seen: Mapping[str, Explanation],
    judged: Mapping[str, Trust],
    other: Mapping[str, Explanation],
) -> dict[str, np.ndarray]:
    """By name and method: maps [images, rows, columns], gaps [images], what the model says."""
    arrays: dict[str, Any] = {}
    first = next(iter(seen.values()))
    for name in ("target", "predicted", "logit", "probability"):
        arrays[name] = getattr(first, name)
    for method, one in seen.items():
        arrays[f"map_{method}"] = one.map
        if one.tokens is not None:
            arrays[f"tokens_{method}"] = one.tokens
    arrays |= {f"against_{method}": one.map for method, one in other.items()}
    for method, trust in judged.items():
        arrays |= {f"gap_{kind}_{method}": gap for kind, gap in trust.gaps.items()}
    return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
