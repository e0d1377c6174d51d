"""Methods for any model: gradients at the pixels; and controls that need no model."""

from collections.abc import Sequence

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


def random(question: Question, *, seed: int = 0) -> Tensor:
    """Return uniform random numbers between 0 and 1, [batch, rows, columns].

    Args:
        seed: seed of the numbers; torch's global random state is not used.
    """
    return drawn(_shape(question), seed).to(question.images.device)


def centre(question: Question, *, spread: float = 0.25) -> Tensor:
    """Return a Gaussian about the middle of the image, exp(−(u² + v²) / 2), [batch, rows, columns].

    u and v are distances from the middle divided by `spread` times the side. It is a strong
    baseline, since the object of a photograph often is in the middle.
    """
    batch, rows, columns = _shape(question)
    bump = centred(rows, columns, spread).to(question.images.device)
    return bump.expand(batch, rows, columns).clone()


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Return uniform numbers between 0 and 1 from a separate generator."""
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed))


def centred(rows: int, columns: int, spread: float) -> Tensor:
    """Return the Gaussian of `centre`, [rows, columns]."""
    if not spread > 0:
        raise ValueError(f"spread: expected a positive number, got {spread}")
    u, v = (((torch.arange(n) + 0.5) / n - 0.5) / spread for n in (rows, columns))
    return torch.exp(-(u[:, None] ** 2 + v[None] ** 2) / 2)


def _shape(question: Question) -> torch.Size:
    return over_patches(question, question.images.detach()).shape
