"""The answer without each patch alone, for the page."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from attnkit.interpret.explanation import Explanation
from attnkit.interpret.methods.question import Question, looking
from attnkit.interpret.page.attention import Grid, cell_grid, own_grid
from attnkit.interpret.trust.curves import answers_without, of_images
from attnkit.interpret.trust.places import removal_grid
from attnkit.interpret.trust.removal import REMOVALS, NotAvailableError, removal


class Without(NamedTuple):
    """The target's probability without each place of the grid alone.

    whole: [batch], with all.
    kind: how a place is taken away, in words.
    """

    grid: Grid
    p: Annotated[Tensor, "batch places"]
    whole: Annotated[Tensor, "batch"]
    kind: str


def without_each(
    explanation: Explanation, grid: Grid | None = None, batch_size: int = 64
) -> Without:
    """A forward for each place of each image: tokens masked where the model allows it, else the
    mean colour.

    Args:
        grid: of the places; None: the model's patches, or coarser, of at most 256 places.
    """
    model, images, target = explanation.model, explanation.images, explanation.target
    question = Question(model, images, target, grid=own_grid(explanation))
    if grid is None:
        grid = cell_grid(*removal_grid(question, explanation.map))
    with looking(model), torch.no_grad():
        question.ask()
        try:
            kind, answer = "mask", removal("mask", question, grid)
        except NotAvailableError:
            kind, answer = "mean", removal("mean", question, grid)
        alone = torch.eye(grid[0] * grid[1], dtype=torch.bool, device=images.device)
        none = torch.zeros_like(alone[:1])
        removed = torch.cat([none, alone])[:, None].expand(-1, len(images), -1)
        said = f"leaving one patch out, {REMOVALS[kind]}"
        without = of_images(question, answer)
        _, p, _ = answers_without(question, without, removed, batch_size, said)
    return Without(grid, p[1:].T, p[0], REMOVALS[kind])
