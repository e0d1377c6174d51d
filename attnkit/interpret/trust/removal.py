"""Ways of taking patches away: hiding their tokens from attention, or painting them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from attnkit.core.hidden import hide_keys
from attnkit.interpret.methods.grid import Grid as Tokens
from attnkit.interpret.methods.grid import patch_grid, settled, token_grids
from attnkit.interpret.methods.question import Question, logits_of
from attnkit.interpret.trust.places import Grid, Places, as_pixels

REMOVALS = {"mask": "tokens masked", "mean": "mean colour", "blur": "blurred"}
"""The kinds of removal, and what they are called in sentences."""

Images = Annotated[Tensor, "batch channels height width"]
Answer = Callable[[Images, Places], Annotated[Tensor, "batch classes"]]
"""The logits of images without some of their places."""


class NotAvailableError(ValueError):
    """A model whose patches cannot be removed in this way; the message is the reason."""


def removal(name: str, question: Question, grid: Grid) -> Answer:
    """What the model says without some patches, by the name of the way that they are removed.

    - "mask": no attention of the model looks at their tokens (`hide_keys`).
    - "mean": their pixels have the mean colour of all the images of the question.
    - "blur": their pixels are those of the image blurred by a Gaussian, σ a side of a patch.

    Raises:
        ValueError: another name.
        NotAvailableError: a model whose tokens cannot be hidden, by `hiding`.
    """
    if name not in REMOVALS:
        raise ValueError(f"removals: expected some of {', '.join(REMOVALS)}, got {name!r}")
    if name == "mask":
        return hiding(question, grid)[0]
    return painting(name, question, grid)


def painting(name: str, question: Question, grid: Grid) -> Answer:
    """Patches painted over."""
    images, size = question.images.detach(), tuple(question.images.shape[-2:])
    colour = images.mean(dim=(0, 2, 3), keepdim=True)
    sigma = [max(pixels / places, 1.0) for pixels, places in zip(size, grid, strict=True)]
    # a kernel of ± 2 σ that the mirrored image still fills
    kernel = [2 * min(round(2 * s), n - 1) + 1 for s, n in zip(sigma, size, strict=True)]
    pixels = pixels_of(question, grid)

    def blurred(images: Tensor) -> Tensor:
        return gaussian_blur(images, kernel[::-1], sigma[::-1])  # widths before heights

    def answer(images: Tensor, removed: Tensor) -> Tensor:
        paint = colour if name == "mean" else blurred(images)
        return logits_of(question.model(torch.where(pixels(removed), paint, images)))

    return answer


def pixels_of(question: Question, grid: Grid) -> Callable[[Places], Tensor]:
    """From removed places of a grid to their pixels, [batch, 1, height, width].

    Places of the model's patches have the pixels that the patch embedding gives them.
    """
    height, width = question.images.shape[-2:]
    patches = patch_grid(question.model, question.images)
    covered = None
    if patches and not (patches.rows % grid[0] or patches.columns % grid[1]):
        covered = patches.covered
    return lambda removed: as_pixels(removed, grid, (height, width), covered)


def hiding(question: Question, grid: Grid | None = None) -> tuple[Answer, Grid]:
    """Tokens hidden from all attention, after it was tried that nothing of them is left; and the
    grid of the places.

    Half of the patches are hidden and their pixels replaced by noise: where the logits change,
    what is hidden still reaches them, through a mean over all tokens, a convolution, or attention
    that is not seen. And the logits have to change with what is hidden.

    Args:
        grid: of the places, each of which is some patches; None: of the patches.

    Raises:
        NotAvailableError: something of the patches is left, or they are not known.
    """
    images = question.images.detach()[:4]
    tokens = _tokens(question)
    rows, columns = grid = grid or (tokens.rows, tokens.columns)
    high, wide = tokens.rows // rows, tokens.columns // columns
    if (rows * high, columns * wide) != (tokens.rows, tokens.columns):
        raise NotAvailableError(
            f"a place of {rows} x {columns} is not some of the model's "
            f"{tokens.rows} x {tokens.columns} patches"
        )

    def answer(images: Tensor, removed: Tensor) -> Tensor:
        hidden = removed.unflatten(1, grid).repeat_interleave(high, dim=1)
        hidden = hidden.repeat_interleave(wide, dim=2).flatten(1)
        with hide_keys(hidden, tokens.num_prefix_tokens, tokens.num_suffix_tokens):
            return logits_of(question.model(images.clone()))  # which may begin in place

    generator = torch.Generator().manual_seed(0)
    places = rows * columns
    half = torch.rand(len(images), places, generator=generator).argsort(dim=1) < (places + 1) // 2
    half = half.to(images.device)
    spread = images.std() or 1.0  # of an image of one colour there is none
    noise = torch.randn(images.shape, generator=generator).to(images) * spread + images.mean()
    noisy = torch.where(pixels_of(question, grid)(half), noise, images)
    with torch.no_grad():
        without, other = answer(images, half), answer(noisy, half)
        whole = logits_of(question.model(images.clone()))
        unhidden = (logits_of(question.model(noisy)) - whole).abs().max()
    if not (without - other).abs().max() <= 1e-3 * unhidden:
        raise NotAvailableError(
            "hidden patches still reach the logits, by a mean over all tokens, a "
            "convolution, or attention that is not computed by torch's function"
        )
    if unhidden and torch.equal(without, whole):
        raise NotAvailableError("the logits stay the same without half of the patches")
    return answer, grid


def _tokens(question: Question) -> Tokens:
    """Where the patches are among the keys of the model's first attention."""
    if question.chain is not None:
        return question.chain.grid
    found = token_grids(question.model, question.images, num_tokens=0)
    if not found:
        raise NotAvailableError("no attention that can be masked ran")
    (((_, num_tokens), grid),) = found.items()
    try:
        return settled(question.model, question.images, num_tokens, grid, None, None)
    except ValueError:
        raise NotAvailableError(
            f"its attention is of {num_tokens} keys, which are not known to be patches"
        ) from None
