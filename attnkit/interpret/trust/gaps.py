"""What a prediction loses without the patches that a map ranks first, or random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from attnkit.interpret.trust.case import Case, Values
from attnkit.interpret.trust.curves import answers, both_orders, removed_counts, shares
from attnkit.interpret.trust.places import removal_ranks
from attnkit.interpret.trust.removal import REMOVALS
from attnkit.interpret.trust.result import Fall, Score
from attnkit.metrics.perturbation import perturbation_gap

SAID_SHARE = 0.2
ENOUGH_IMAGES = 10
"""From which on two maps are compared by how their difference varies from image to image."""

Curves = dict[str, Annotated[Tensor, "orders batch points"]]
"""By map: most-first and least-first; of "random" one order and its reverse by turns."""


def score_gaps(case: Case, fractions: Sequence[float]) -> None:
    """For each kind of removal: gaps, what is lost without a fifth, and the verdicts."""
    places = case.grid[0] * case.grid[1]
    counts = removed_counts(fractions, places)
    if len(counts) < 3:
        raise ValueError(
            f"fractions: expected one that is some and not all of {places} patches, "
            f"got {list(fractions)}"
        )
    case.result.removed = removed = shares(counts).to(case.maps["map"])
    said = min(range(1, len(counts) - 1), key=lambda n: abs(float(removed[n]) - SAID_SHARE))
    by_map = {name: _both_orders(case, map) for name, map in case.maps.items()}
    by_map["random"] = torch.cat([_both_orders(case, map) for map in case.random])
    ranks, sizes = torch.cat([*by_map.values()]), [len(ranks) for ranks in by_map.values()]
    symbol = case.result.symbol
    for kind, without in case.removals.items():
        said_by = f"removing patches, {REMOVALS[kind]}"
        found = answers(case.question, without, ranks, counts, case.batch_size, said_by)
        logit, probability = (
            dict(zip(by_map, values.split(sizes), strict=True)) for values in found[:2]
        )
        score, gaps = _gaps(case, f"gap in {symbol}, {REMOVALS[kind]}", probability)
        _gaps(case, f"gap in logit, {REMOVALS[kind]}", logit)
        case.result.gaps[kind] = gaps["map"]
        case.result.curves[kind] = probability
        case.result.verdicts[kind] = _verdicts(score.within or 0.0, gaps)
        case.result.falls[kind] = fall(probability, removed, said, symbol)


def _both_orders(case: Case, map: Tensor) -> Annotated[Tensor, "2 batch places", int]:
    return both_orders(removal_ranks(map, case.generator))


def _gaps(case: Case, name: str, curves: Curves) -> tuple[Score, Values]:
    """The score, and the gaps of each image."""
    gaps = {
        key: perturbation_gap(both[::2], both[1::2], case.result.removed)
        for key, both in curves.items()
    }
    # of an order and its reverse the gaps are each other's negative, so that their mean is 0
    drawn = gaps.pop("random")
    within = 2 * float((drawn.square().mean() / drawn.shape[1]).sqrt())
    found = {key: gap[0] for key, gap in gaps.items()}
    return case.add(name, found, random=0.0, within=within), found


def _verdicts(within: float, gaps: Values) -> tuple[str, ...]:
    """Better or not than what else there is, by more than two standard errors."""
    words = [f"{'better' if float(gaps['map'].mean()) > within else 'no better'} than random"]
    for name in ("centre", "input_gradient"):
        if name in gaps:
            more = gaps["map"] - gaps[name]
            least = within * 2**0.5
            if len(more) >= ENOUGH_IMAGES:
                least = 2 * float(more.std()) / len(more) ** 0.5
            better = "better" if float(more.mean()) > least else "no better"
            words.append(f"{better} than {name.replace('_', ' ')}")
    return tuple(words)


def fall(
    curves: Curves, removed: Annotated[Tensor, "points"], said: int, symbol: str = "p"
) -> Fall:
    """What is lost at one point of the curves."""
    random = curves["random"][..., said].mean(dim=1)
    middle, error = float(random.mean()), float(random.std() / len(random) ** 0.5)
    whole, without = (float(curves["map"][0, :, point].mean()) for point in (0, said))
    low, high = middle - 2 * error, middle + 2 * error
    return Fall(float(removed[said]), whole, without, middle, low, high, len(random), symbol)
