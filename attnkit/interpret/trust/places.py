"""The places that are removed: the model's patches, whatever the size of a map."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.interpret.methods.grid import patch_grid
from attnkit.interpret.methods.question import Question

Grid = tuple[int, int]
Maps = Annotated[Tensor, "batch map_height map_width"]
Places = Annotated[Tensor, "*batch places", bool]

LARGEST_GRID = 16  # rows and columns for a model without patches


def removal_grid(question: Question, maps: Tensor) -> Grid:
    """Rows and columns of what is removed: the grid asked for, else that of the model's patches.

    Of a model without a patch embedding, the map's own, of at most 16 rows and columns.
    """
    height, width = question.images.shape[-2:]
    if question.grid is not None:
        rows, columns = question.grid
        if not (1 <= rows <= height and 1 <= columns <= width):
            raise ValueError(
                f"grid: expected rows and columns of an image of {height} x {width} pixels, "
                f"got {question.grid}"
            )
        return question.grid
    patches = patch_grid(question.model, question.images)
    if patches is not None:
        return patches.grid
    rows, columns = maps.shape[1:]
    return min(rows, LARGEST_GRID, height), min(columns, LARGEST_GRID, width)


def on_grid(maps: Tensor, grid: Grid) -> Maps:
    """Maps of any size on the grid: the mean of what falls into a place, or the nearest value.

    Means are taken in float64 and rounded to float32, so that equal values stay equal.
    """
    if tuple(maps.shape[1:]) == grid:
        return maps.float()
    return F.adaptive_avg_pool2d(maps.double()[:, None], grid)[:, 0].float()


def removal_ranks(maps: Maps, generator: torch.Generator) -> Annotated[Tensor, "batch places", int]:
    """The place of each patch in most-first order; ties are random.

    A constant map is thus a random order, and of a map that is mostly 0 no more is removed than
    was asked for.
    """
    values = maps.flatten(1).cpu()
    lots = torch.rand(values.shape, generator=generator).argsort(dim=1)
    order = values.gather(1, lots).argsort(dim=1, descending=True, stable=True)
    return lots.gather(1, order).argsort(dim=1).to(maps.device)


def as_pixels(
    removed: Places, grid: Grid, size: Grid, covered: Grid | None = None
) -> Annotated[Tensor, "batch 1 height width", bool]:
    """The pixels of the removed places; a pixel belongs to the place its middle is in.

    Args:
        covered: height and width in pixels of all places together, from the top left; None: of the
            whole image. Pixels beyond belong to the nearest place.
    """
    rows, columns = (
        ((torch.arange(pixels, device=removed.device) + 0.5) * places / whole)
        .long()
        .clamp(max=places - 1)
        for pixels, places, whole in zip(size, grid, covered or size, strict=True)
    )
    return removed.unflatten(-1, grid)[:, None, rows[:, None], columns]
