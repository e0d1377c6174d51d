"""Gradients of the answer at the image, or integrated along a path from a baseline."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.arguments import at_least
from attnkit.interpret.methods.grid import patch_grid
from attnkit.interpret.methods.question import Question


def input_gradient(question: Question) -> Tensor:
    """Saliency (Simonyan et al., Deep Inside Convolutional Networks, 2014), [batch, rows, columns].

        Σ over channels, and over the pixels of a patch, of |∂y/∂x|

    The map of a model without a patch embedding has one number per pixel.
    """
    (gradient,) = question.gradients(question.ask(), [question.images])
    return over_patches(question, gradient.abs())


def integrated_gradients(
    question: Question, *, baseline: float | Tensor = 0.0, num_steps: int = 32
) -> Tensor:
    """Integrated gradients (Sundararajan et al., Axiomatic Attribution for Deep Networks, 2017),
    [batch, rows, columns], signed.

        (x − x′) ∫ ∂y/∂x at x′ + α (x − x′) dα,   summed over channels and the pixels of a patch

    The sum over a map is y(x) − y(x′) up to the error of the Gauss–Legendre quadrature, which a
    note reports.

    Args:
        baseline: x′, a number or a tensor that broadcasts to the images. 0 is the mean colour of
            images that are normalized by their mean.
        num_steps: number of quadrature points, with a forward and a backward each.
    """
    at_least(1, num_steps=num_steps)
    images = question.images.detach()
    start = torch.as_tensor(baseline, dtype=images.dtype, device=images.device)
    try:
        start = start.expand_as(images)
    except RuntimeError:
        raise ValueError(
            f"baseline: expected a number or a tensor that broadcasts to {list(images.shape)}, "
            f"got {list(start.shape)}"
        ) from None
    end = question.ask().detach()
    points, weights = np.polynomial.legendre.leggauss(num_steps)
    total = torch.zeros_like(images)
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        between = (start + float(point) * (images - start)).requires_grad_()
        (gradient,) = question.gradients(question.ask(between), [between])
        total += float(weight) * gradient
    total *= images - start
    with torch.no_grad():
        missing = (end - question.ask(start) - total.flatten(1).sum(dim=1)).abs().max()
    question.notes.append(f"integral off by at most {float(missing):.2g} of y")
    return over_patches(question, total)


def over_patches(question: Question, pixels: Tensor) -> Tensor:
    """Sum [batch, channels, height, width] over channels and each patch to a map."""
    values, grid = pixels.sum(dim=1), question.grid
    patches = patch_grid(question.model, question.images)
    if patches is not None and (grid is None or patches.are_in(grid)):
        below, right = (n - m for n, m in zip(patches.covered, values.shape[1:], strict=True))
        values = F.pad(values, (0, right, 0, below))  # cuts off where negative
        grid = grid or patches.grid
    return values if grid is None else sum_over(values, grid)


def sum_over(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sum [batch, height, width] over each place of a grid to [batch, rows, columns]."""
    high, wide = pixels_of_place(grid, *values.shape[-2:])
    return F.avg_pool2d(values[:, None], (high, wide))[:, 0] * (high * wide)


def pixels_of_place(grid: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return height and width in pixels of a place of a grid, which must divide the image."""
    if height % grid[0] or width % grid[1]:
        raise ValueError(
            f"grid: {grid[0]} x {grid[1]} does not divide an image of {height} x {width} pixels"
        )
    return height // grid[0], width // grid[1]
