"""A model's prediction while more and more of an image is removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.question import Question, Target, looking, probabilities
from attnkit.interpret.progress import shown
from attnkit.interpret.trust.places import Grid, on_grid, removal_grid, removal_ranks
from attnkit.interpret.trust.removal import Answer, removal

FRACTIONS = (0.2, 0.5)
FULL_FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Shares that are removed, beside nothing and all."""


class PerturbationCurves(NamedTuple):
    """The target's probability or logit at each share removed, in the order of the metric's update.

    most_first, least_first: where the places that the map ranks highest, or lowest, go first.
    removed: the shares, from 0 to 1.
    """

    most_first: Annotated[Tensor, "batch points"]
    least_first: Annotated[Tensor, "batch points"]
    removed: Annotated[Tensor, "points"]


def perturbation_curves(
    model: nn.Module,
    inputs: Annotated[Tensor, "batch channels height width"],
    target: Target,
    map: Annotated[Tensor, "batch map_height map_width"],
    *,
    removal: str = "mean",
    fractions: Sequence[float] = FRACTIONS,
    of: str = "probability",
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
        of: "probability" or "logit".

    Raises:
        ValueError, TypeError: as `attnkit.trust`; a removal that is not available is one.
    """
    if of not in ("probability", "logit"):
        raise ValueError(f"of: expected probability or logit, got {of!r}")
    question = Question(model, inputs, target, grid=grid)
    check_map(map, question)
    with looking(model), torch.no_grad():
        question.ask()
        places = removal_grid(question, map)
        answer = _removal(removal, question, places)
        maps = on_grid(map.detach().to(question.images.device), places)
        most = removal_ranks(maps, torch.Generator().manual_seed(seed))
        ranks = torch.stack((most, most.shape[1] - 1 - most))
        counts = removed_counts(fractions, most.shape[1])
        logit, probability = answers(question, answer, ranks, counts, batch_size)
    most_first, least_first = probability if of == "probability" else logit
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


def answers(
    question: Question,
    answer: Answer,
    ranks: Annotated[Tensor, "orders batch places", int],
    counts: Sequence[int],
    batch_size: int,
    description: str = "removing patches",
) -> Annotated[Tensor, "2 orders batch points"]:
    """Logit and probability of the target without the first `counts` places of each order.

    Both ends are the same in all orders and are computed once.
    """
    orders = len(ranks)
    steps = [(0, counts[0]), (0, counts[-1])]
    steps += [(order, count) for order in range(orders) for count in counts[1:-1]]
    removed = torch.stack([ranks[order] < count for order, count in steps])
    ends, inner = answers_without(question, answer, removed, batch_size, description).split(
        [2, len(steps) - 2], dim=1
    )
    between = inner.unflatten(1, (orders, len(counts) - 2)).movedim(2, 3)
    first, last = (end[:, None, :, None].expand(-1, orders, -1, -1) for end in ends.unbind(1))
    return torch.cat([first, between, last], dim=3)


def answers_without(
    question: Question,
    answer: Answer,
    removed: Annotated[Tensor, "_ batch places", bool],
    batch_size: int,
    description: str = "removing patches",
) -> Annotated[Tensor, "2 _ batch"]:
    """Logit and probability of the target of each image, without these places of it."""
    at_least(1, batch_size=batch_size)
    assert question.target is not None
    images, (steps, batch, _) = question.images.detach(), removed.shape
    flat, found = removed.flatten(0, 1), []
    for chunk in shown(torch.arange(steps * batch).split(batch_size), description):
        items = (chunk % batch).to(images.device)
        with torch.no_grad():
            logits = answer(images[items], flat[chunk.to(flat.device)])
        found.append(target_values(logits, question.target[items]))
    return torch.cat(found, dim=1).unflatten(1, (steps, batch))


def target_values(logits: Tensor, target: Tensor) -> Annotated[Tensor, "2 batch"]:
    """Logit and probability of the target; of a single logit, by a sigmoid."""
    both = logits, probabilities(logits)
    return torch.stack([values.gather(1, target[:, None])[:, 0] for values in both])


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
