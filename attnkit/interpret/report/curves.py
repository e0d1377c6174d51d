"""The curves of a page: p while patches are removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attnkit.interpret.trust.curves import gaps_of
from attnkit.interpret.trust.removal import REMOVALS
from attnkit.interpret.trust.result import Fall, Trust, verdict

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
        for number, (name, trust) in enumerate(of_kind.items()):
            colour = f"c{number % _COLOURS}"
            most, least = trust.curves[kind]["map"][:, image]
            lines += [_line(f"{colour} solid", xs, most), _line(f"{colour} dashed", xs, least)]
            legend.append({"style": f"{colour} solid", "name": name})
        figures.append(
            {
                "title": f"Patches removed: {REMOVALS[kind]}",
                "alt": f"p({target}) against the share of patches removed, {REMOVALS[kind]}",
                "y": f"p({_cut(target)})",
                "x": "patches removed",
                "ticks": [(x, f"{100 * x:.0f} %") for x in (0, 0.5, 1)],
                "band": _band(xs, random.amin(dim=0), random.amax(dim=0)),
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


def _line(style: str, xs: Sequence[float], ys: Tensor) -> dict[str, Any]:
    return {"style": style, "points": _points(xs, ys)}


def _band(xs: Sequence[float], low: Tensor, high: Tensor) -> list[tuple[float, float]]:
    return [*_points(xs, low), *_points(xs, high)[::-1]]


def _points(xs: Sequence[float], ys: Tensor) -> list[tuple[float, float]]:
    """Return the points of a curve, from 0 to 1 in both directions."""
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def _cut(name: str) -> str:
    return name if len(name) < 16 else f"{name[:14]}…"
