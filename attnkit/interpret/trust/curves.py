"""Perturbation curves: a model's answer while more and more units are removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.console import shown
from attnkit.interpret.methods.question import Classes, Question, Target, looking
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.removal import Answer, Grid, Maps, on_grid, removal_grid
from attnkit.interpret.trust.removal import removal as removal_of
from attnkit.metrics.maps import perturbation_gap

FRACTIONS = (0.2, 0.5)
FULL_FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Shares of the patches that are removed, in addition to none and all."""

Ranks = Annotated[Tensor, "*orders batch places", int]
"""The position of each place in the order of removal; 0 is removed first."""
Without = Callable[[Annotated[Tensor, "_", int], Annotated[Tensor, "_ places", bool]], Tensor]
"""A function to the logits [_, *words, classes] of items of a batch without some of their units."""

Curves = Mapping[str, Annotated[Tensor, "orders batch points"]]
"""Curves by map: most-first and least-first; for "random", orders of which every second one is the
reverse of the one before."""
Values = dict[str, Annotated[Tensor, "batch"]]
"""A number for each image, by map."""


class PerturbationCurves(NamedTuple):
    """The target's probability, or the chosen quantity, at each removed share, in the order of the
    arguments of the metric's update.

    most_first, least_first: curves in which the highest-ranked, or lowest-ranked, places are
        removed first.
    removed: the shares, from 0 to 1.
    """

    most_first: Annotated[Tensor, "batch points"]
    least_first: Annotated[Tensor, "batch points"]
    removed: Annotated[Tensor, "points"]


def perturbation_curves(
    model: nn.Module,
    inputs: Annotated[Tensor, "batch channels height width"],
    target: Classes,
    map: Annotated[Tensor, "batch map_height map_width"],
    *,
    removal: str = "mean",
    fractions: Sequence[float] = FRACTIONS,
    of: Of = "probability",
    grid: Grid | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> PerturbationCurves:
    """Return curves of a map for `attnkit.metrics.PerturbationGap`, over whole test sets and ranks.

        gap = attnkit.metrics.PerturbationGap()
        for images, labels in loader:
            map = attnkit.explain(model, images).map
            gap.update(*attnkit.perturbation_curves(model, images, None, map))

    An image takes 2 · fractions + 2 forwards.

    Args:
        model, inputs, target, map, grid, seed, batch_size: as in `attnkit.trust`.
        removal: "mask", "mean" or "blur", as in `attnkit.trust`.
        fractions: the removed shares, in addition to 0 and 1.
        of: the quantity of the curves, as in `attnkit.explain`.

    Raises:
        ValueError, TypeError: as in `attnkit.trust`, or a removal that is not available.
    """
    question = Question(model, inputs, target, grid=grid, of=of)
    check_map(map, question)
    with looking(model), torch.no_grad():
        question.ask()
        places = removal_grid(question, map)
        without = of_images(question, removal_of(removal, question, places))
        maps = on_grid(map.detach().to(question.images.device), places)
        ranks = removal_ranks(maps, torch.Generator().manual_seed(seed))
        counts = removed_counts(fractions, places[0] * places[1])
        _, values, _ = answers(question, without, both_orders(ranks), counts, batch_size)
    most_first, least_first = values
    return PerturbationCurves(most_first, least_first, shares(counts).to(most_first))


# --- what is removed ------------------------------------------------------------------------------


def removed_counts(fractions: Sequence[float], places: int) -> list[int]:
    """Return the number of removed places at each point: none, the nearest to each share, all."""
    fractions = list(fractions)
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions: expected shares between 0 and 1, got {fractions}")
    return sorted({0, places, *(round(fraction * places) for fraction in fractions)})


def shares(counts: Sequence[int]) -> Annotated[Tensor, "points"]:
    """Return the removed share at each point."""
    return torch.tensor(counts, dtype=torch.float64) / counts[-1]


def removal_ranks(maps: Maps, generator: torch.Generator) -> Ranks:
    """Return the position of each patch in most-first order, [batch, places]; ties are random.

    A constant map thus gives a random order, and a map that is mostly 0 loses no more patches at a
    point than any other.
    """
    values = maps.flatten(1).cpu()
    lots = torch.rand(values.shape, generator=generator).argsort(dim=1)
    order = values.gather(1, lots).argsort(dim=1, descending=True, stable=True)
    return lots.gather(1, order).argsort(dim=1).to(maps.device)


def both_orders(most: Ranks) -> Annotated[Tensor, "2 *orders batch places", int]:
    """Return the ranks of most-first and of least-first order."""
    return torch.stack((most, most.shape[-1] - 1 - most))


def removed_at(ranks: Ranks, counts: Sequence[int]) -> Annotated[Tensor, "_ batch places", bool]:
    """Return the places that are removed at each point of each order, order by order."""
    points = torch.tensor(counts, device=ranks.device)[:, None, None]
    return (ranks[:, None] < points).flatten(0, 1)


# --- answers --------------------------------------------------------------------------------------


def of_images(question: Question, answer: Answer) -> Without:
    """Return a kind of removal as a function of items of the batch."""
    images = question.images.detach()
    return lambda items, removed: answer(images[items], removed)


def answers(
    target: Target,
    without: Without,
    ranks: Annotated[Tensor, "orders batch places", int],
    counts: Sequence[int],
    batch_size: int,
    description: str = "removing patches",
) -> Annotated[Tensor, "3 orders batch points"]:
    """Return `Target.values` without the first `counts` places of each order."""
    removed = removed_at(ranks, counts)
    found = answers_without(target, without, removed, batch_size, description)
    return found.unflatten(1, (len(ranks), len(counts))).movedim(2, -1)


def answers_without_each(
    target: Target, without: Without, places: int, batch_size: int, description: str
) -> Annotated[Tensor, "3 _ batch *words"]:
    """Return `Target.values` with all places, and then without each single place."""
    assert target.logits is not None
    batch, device = len(target.logits), target.logits.device
    each = torch.eye(places, dtype=torch.bool, device=device)
    removed = torch.cat([torch.zeros_like(each[:1]), each])[:, None].expand(-1, batch, -1)
    return answers_without(target, without, removed, batch_size, description)


def answers_without(
    target: Target,
    without: Without,
    removed: Annotated[Tensor, "_ batch places", bool],
    batch_size: int,
    description: str = "removing patches",
) -> Annotated[Tensor, "3 _ batch *words"]:
    """Return `Target.values` of each item without the removed units: the target's logit, its
    quantity, and whether it is still predicted.

    Equal removals from the same item, such as both ends of all curves, are computed once.
    """
    at_least(1, batch_size=batch_size)
    steps, batch, _ = removed.shape
    flat = removed.flatten(0, 1)
    packed = np.packbits(flat.cpu().numpy(), axis=1)
    keys = [(row % batch, bits.tobytes()) for row, bits in enumerate(packed)]
    rows_of = {key: row for row, key in reversed([*enumerate(keys)])}
    asked = sorted(rows_of.values())
    places = {row: place for place, row in enumerate(asked)}
    found = []
    for chunk in shown(torch.tensor(asked).split(batch_size), description):
        rows = chunk.to(flat.device)
        with torch.no_grad():
            logits = without(rows % batch, flat[rows])
        found.append(target.values(logits, rows % batch))
    every = [places[rows_of[key]] for key in keys]
    return torch.cat(found, dim=1)[:, every].unflatten(1, (steps, batch))


def gaps_of(curves: Curves, removed: Annotated[Tensor, "points"]) -> tuple[Values, float]:
    """Return the perturbation gap of each map and image, and two standard errors of the mean gap of
    random maps over the images, which is 0."""
    gaps = {key: perturbation_gap(both[::2], both[1::2], removed) for key, both in curves.items()}
    # an order and its reverse have opposite gaps, so that the mean of random gaps is 0
    by_lot = gaps.pop("random")
    within = 2 * float((by_lot.square().mean() / by_lot.shape[1]).sqrt())
    return {key: gap[0] for key, gap in gaps.items()}, within


def check_orders(orders: int) -> None:
    """Raise a ValueError unless the number of random orders is positive and even."""
    at_least(2, orders=orders)
    if orders % 2:
        raise ValueError(f"orders: expected an even number, half of them reversed, got {orders}")


def check_map(map: Tensor, question: Question, name: str = "map") -> None:
    """Raise a ValueError or TypeError unless `map` is a map of the question's images."""
    if not isinstance(map, Tensor) or not map.is_floating_point():
        given = map.dtype if isinstance(map, Tensor) else type(map).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {given}")
    if map.ndim != 3 or len(map) != question.batch or not map.numel():
        channels = "; sum over the channels first" if map.ndim == 4 else ""
        raise ValueError(
            f"{name}: expected [batch, rows, columns] of {question.batch} images, "
            f"got {list(map.shape)}{channels}"
        )
    if not map.isfinite().all():
        raise ValueError(f"{name}: expected finite values, got NaN or infinite ones")
