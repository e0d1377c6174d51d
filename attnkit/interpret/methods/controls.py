"""Maps that ignore the model, as a baseline for all others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.interpret.methods.gradients import over_patches
from attnkit.interpret.methods.question import Question


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
