"""Ways of taking patches away: hiding their tokens from attention, or painting them over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from attnkit.core.hidden import hide_keys
from attnkit.interpret.methods.grid import MAX_PREFIX_TOKENS, patch_grid
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
        NotAvailableError: a model whose tokens cannot be hidden.
    """
    if name not in REMOVALS:
        raise ValueError(f"removals: expected some of {', '.join(REMOVALS)}, got {name!r}")
    if name == "mask":
        return hiding(question, grid)
    return painting(name, question, grid)


def painting(name: str, question: Question, grid: Grid) -> Answer:
    """Patches painted over."""
    images, size = question.images.detach(), tuple(question.images.shape[-2:])
    colour = images.mean(dim=(0, 2, 3), keepdim=True)
    sigma = [max(pixels / places, 1.0) for pixels, places in zip(size, grid, strict=True)]
    # a kernel of ± 2 σ that the mirrored image still fills
    kernel = [2 * min(round(2 * s), n - 1) + 1 for s, n in zip(sigma, size, strict=True)]

    def blurred(images: Tensor) -> Tensor:
        return gaussian_blur(images, kernel[::-1], sigma[::-1])  # widths before heights

    def answer(images: Tensor, removed: Tensor) -> Tensor:
        height, width = size
        covered = as_pixels(removed, grid, (height, width))
        paint = colour if name == "mean" else blurred(images)
        return logits_of(question.model(torch.where(covered, paint, images)))

    return answer


def hiding(question: Question, grid: Grid) -> Answer:
    """Tokens hidden from all attention, after it was tried that nothing of them is left.

    Half of the patches are hidden and their pixels replaced by noise: where the logits change,
    what is hidden still reaches them, through a mean over all tokens, a convolution, or attention
    that is not seen.
    """
    images = question.images.detach()[:4]
    generator = torch.Generator().manual_seed(0)
    places, height, width = grid[0] * grid[1], *images.shape[-2:]
    patches = patch_grid(question.model, (height, width)) or grid
    of_each = patches[0] // grid[0], patches[1] // grid[1]
    if (grid[0] * of_each[0], grid[1] * of_each[1]) != patches:
        raise NotAvailableError(
            f"a place of {grid[0]} x {grid[1]} is not some of the model's "
            f"{patches[0]} x {patches[1]} patches"
        )
    num_prefix = _prefix_tokens(question, images, patches[0] * patches[1])
    half = torch.rand(len(images), places, generator=generator).argsort(dim=1) < (places + 1) // 2
    half = half.to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images) * images.std() + images.mean()
    noisy = torch.where(as_pixels(half, grid, (height, width)), noise, images)

    def answer(images: Tensor, removed: Tensor) -> Tensor:
        of_rows = removed.unflatten(1, grid).repeat_interleave(of_each[0], dim=1)
        hidden = of_rows.repeat_interleave(of_each[1], dim=2).flatten(1)
        with hide_keys(hidden, num_prefix):
            return logits_of(question.model(images))

    with torch.no_grad():
        plain, other = answer(images, half), answer(noisy, half)
        unhidden = logits_of(question.model(noisy)) - logits_of(question.model(images))
    if not (plain - other).abs().max() <= 1e-3 * unhidden.abs().max():
        raise NotAvailableError(
            "hidden patches still reach the logits, by a mean over all tokens, a "
            "convolution, or attention that is not computed by torch's function"
        )
    return answer


def _prefix_tokens(question: Question, images: Tensor, places: int) -> int:
    """How many tokens stand before the patches in the model's attention."""
    nothing = torch.zeros(len(images), places, dtype=torch.bool, device=images.device)
    with torch.no_grad(), hide_keys(nothing) as hiding:
        question.model(images)
    ran = hiding.masked + hiding.passed
    if not ran:
        raise NotAvailableError("no attention that can be masked ran")
    before = Counter({keys - places: times for keys, times in ran.items() if keys >= places})
    found = [count for count, _ in before.most_common() if count <= MAX_PREFIX_TOKENS]
    if not found:
        sizes = ", ".join(map(str, sorted(ran)))
        raise NotAvailableError(f"its attention is of {sizes} keys, not of the {places} patches")
    return next((count for count in found if count), 0)
