"""A model's answer without some of the units, and while more and more of them are removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.question import Classes, Question, Target, looking
from attnkit.interpret.progress import shown
from attnkit.interpret.quantity import Of
from attnkit.interpret.trust.places import Grid, on_grid, removal_grid, removal_ranks
from attnkit.interpret.trust.removal import Answer, removal

FRACTIONS = (0.2, 0.5)
FULL_FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Shares that are removed, beside nothing and all."""

Without = Callable[[Annotated[Tensor, "_", int], Annotated[Tensor, "_ places", bool]], Tensor]
"""The logits [_, *words, classes] of some items of a batch, each without some of its units."""


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
        without = of_images(question, _removal(removal, question, places))
        maps = on_grid(map.detach().to(question.images.device), places)
        most = removal_ranks(maps, torch.Generator().manual_seed(seed))
        counts = removed_counts(fractions, most.shape[1])
        _, values, _ = answers(question, without, both_orders(most), counts, batch_size)
    most_first, least_first = values
    return PerturbationCurves(most_first, least_first, shares(counts).to(most_first))


_removal = removal  # whose name is an argument above


def removed_counts(fractions: Sequence[float], places: int) -> list[int]:
    """How many places are removed at each point: none, the nearest to each share, and all."""
    fractions = list(fractions)
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions: expected shares between 0 and 1, got {fractions}")
    return sorted({0, places, *(round(fraction * places) for fraction in fractions)})


def shares(counts: Sequence[int]) -> Annotated[Tensor, "points"]:
    """The share removed at each point."""
    return torch.tensor(counts, dtype=torch.float64) / counts[-1]


def both_orders(
    most: Annotated[Tensor, "*orders places", int],
) -> Annotated[Tensor, "2 *orders places", int]:
    """Ranks where what is valued most goes first, and where that goes last."""
    return torch.stack((most, most.shape[-1] - 1 - most))


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
    orders = len(ranks)
    steps = [(0, counts[0]), (0, counts[-1])]
    steps += [(order, count) for order in range(orders) for count in counts[1:-1]]
    removed = torch.stack([ranks[order] < count for order, count in steps])
    ends, inner = answers_without(target, without, removed, batch_size, description).split(
        [2, len(steps) - 2], dim=1
    )
    between = inner.unflatten(1, (orders, len(counts) - 2)).movedim(2, 3)
    first, last = (end[:, None, :, None].expand(-1, orders, -1, -1) for end in ends.unbind(1))
    return torch.cat([first, between, last], dim=3)


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
