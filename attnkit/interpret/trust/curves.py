"""A model's answer without some of the units, and while more and more of them are removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.question import Classes, Question, Target, looking
from attnkit.interpret.progress import shown
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.removal import Answer, Grid, Maps, on_grid, removal_grid
from attnkit.interpret.trust.removal import removal as removal_of
from attnkit.metrics.perturbation import perturbation_gap

FRACTIONS = (0.2, 0.5)
FULL_FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Shares that are removed, beside nothing and all."""

Ranks = Annotated[Tensor, "*orders batch places", int]
"""When each place is removed: 0 is the first."""
Without = Callable[[Annotated[Tensor, "_", int], Annotated[Tensor, "_ places", bool]], Tensor]
"""The logits [_, *words, classes] of some items of a batch, each without some of its units."""

Curves = Mapping[str, Annotated[Tensor, "orders batch points"]]
"""By map: most-first and least-first; of "random" one order and its reverse by turns."""
Values = dict[str, Annotated[Tensor, "batch"]]
"""A number for each image, by map."""


class PerturbationCurves(NamedTuple):
    """The target's probability, or what was asked for, at each share removed, in the order of the
    metric's update.

    most_first, least_first: where the places that the map ranks highest, or lowest, go first.
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
    """Curves of a map for `attnkit.metrics.PerturbationGap`, over whole test sets and ranks.

        gap = attnkit.metrics.PerturbationGap()
        for images, labels in loader:
            map = attnkit.explain(model, images).map
            gap.update(*attnkit.perturbation_curves(model, images, None, map))

    2 · fractions + 2 forwards an image.

    Args:
        model, inputs, target, map, grid, seed, batch_size: as of `attnkit.trust`.
        removal: "mask", "mean" or "blur", as there.
        fractions: the shares removed, beside 0 and 1.
        of: what the curves are of, as of `attnkit.explain`.

    Raises:
        ValueError, TypeError: as `attnkit.trust`; a removal that is not available is one.
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
    """How many places are removed at each point: none, the nearest to each share, and all."""
    fractions = list(fractions)
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions: expected shares between 0 and 1, got {fractions}")
    return sorted({0, places, *(round(fraction * places) for fraction in fractions)})


def shares(counts: Sequence[int]) -> Annotated[Tensor, "points"]:
    """The share removed at each point."""
    return torch.tensor(counts, dtype=torch.float64) / counts[-1]


def removal_ranks(maps: Maps, generator: torch.Generator) -> Ranks:
    """The place of each patch in most-first order, [batch, places]; ties are random.

    A constant map is thus a random order, and of a map that is mostly 0 no more is removed than
    was asked for.
    """
    values = maps.flatten(1).cpu()
    lots = torch.rand(values.shape, generator=generator).argsort(dim=1)
    order = values.gather(1, lots).argsort(dim=1, descending=True, stable=True)
    return lots.gather(1, order).argsort(dim=1).to(maps.device)


def both_orders(most: Ranks) -> Annotated[Tensor, "2 *orders batch places", int]:
    """Ranks where what is valued most goes first, and where that goes last."""
    return torch.stack((most, most.shape[-1] - 1 - most))


def removed_at(ranks: Ranks, counts: Sequence[int]) -> Annotated[Tensor, "_ batch places", bool]:
    """The places removed at each point of each order, for one order after the other."""
    points = torch.tensor(counts, device=ranks.device)[:, None, None]
    return (ranks[:, None] < points).flatten(0, 1)


# --- what the model then answers ------------------------------------------------------------------


def of_images(question: Question, answer: Answer) -> Without:
    """A kind of removal as a function of items of the batch."""
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
    """What `Target.values` gives without the first `counts` places of each order."""
    removed = removed_at(ranks, counts)
    found = answers_without(target, without, removed, batch_size, description)
    return found.unflatten(1, (len(ranks), len(counts))).movedim(2, -1)


def answers_without_each(
    target: Target, without: Without, places: int, batch_size: int, description: str
) -> Annotated[Tensor, "3 _ batch *words"]:
    """What `Target.values` gives with all places, and then without each alone."""
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
    """What `Target.values` gives of each item without these units of it: logit, quantity, and
    whether it is still predicted.

    The same units of the same item, as both ends of all curves are, are taken away once.
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
    """The perturbation gap of each map and image, and how far from 0 random maps are: two standard
    errors of their mean over the images."""
    gaps = {key: perturbation_gap(both[::2], both[1::2], removed) for key, both in curves.items()}
    # of an order and its reverse the gaps are each other's negative, so that their mean is 0
    by_lot = gaps.pop("random")
    within = 2 * float((by_lot.square().mean() / by_lot.shape[1]).sqrt())
    return {key: gap[0] for key, gap in gaps.items()}, within


def check_orders(orders: int) -> None:
    """ValueError for a number of random orders, half of which are the other half reversed."""
    at_least(2, orders=orders)
    if orders % 2:
        raise ValueError(f"orders: expected an even number, half of them reversed, got {orders}")


def check_map(map: Tensor, question: Question, name: str = "map") -> None:
    """ValueError or TypeError for what is not a map of these images."""
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
