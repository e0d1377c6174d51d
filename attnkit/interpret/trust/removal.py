"""Removal of patches: hiding their tokens from attention, or painting over their pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2.functional import gaussian_blur

from attnkit.core.key_masking import hide_keys
from attnkit.interpret.methods.grid import Grid as Tokens
from attnkit.interpret.methods.grid import patch_grid, settled, token_grids
from attnkit.interpret.methods.question import Question, logits_of

REMOVALS = {"mask": "tokens masked", "mean": "mean colour", "blur": "blurred"}
"""The kinds of removal, and their names in sentences."""
LARGEST_GRID = 16
"""The maximum number of rows and of columns of removed places for a model without patches."""

Grid = tuple[int, int]
Maps = Annotated[Tensor, "batch map_height map_width"]
Images = Annotated[Tensor, "batch channels height width"]
Places = Annotated[Tensor, "*batch places", bool]
Answer = Callable[[Images, Places], Annotated[Tensor, "batch classes"]]
"""A function from images and removed places to logits."""


class NotAvailableError(ValueError):
    """Raised if a model does not allow a kind of removal; the message is the reason."""


# --- places ---------------------------------------------------------------------------------------


def removal_grid(question: Question, maps: Tensor) -> Grid:
    """Return rows and columns of the removed places: the given grid, or that of the patches.

    For a model without a patch embedding, it is the map's grid, with at most 16 rows and columns.
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
    """Resample maps of any size to the grid: the mean within a place, or the nearest value.

    Means are taken in float64 and rounded to float32, so that equal values stay equal.
    """
    if tuple(maps.shape[1:]) == grid:
        return maps.float()
    return F.adaptive_avg_pool2d(maps.double()[:, None], grid)[:, 0].float()


def as_pixels(
    removed: Places, grid: Grid, size: Grid, covered: Grid | None = None
) -> Annotated[Tensor, "batch 1 height width", bool]:
    """Return the pixels of the removed places; a pixel belongs to the place that its centre is in.

    Args:
        covered: height and width in pixels of all places together, from the top left; None: those
            of the whole image. Pixels outside belong to the nearest place.
    """
    rows, columns = (
        ((torch.arange(pixels, device=removed.device) + 0.5) * places / whole)
        .long()
        .clamp(max=places - 1)
        for pixels, places, whole in zip(size, grid, covered or size, strict=True)
    )
    return removed.unflatten(-1, grid)[:, None, rows[:, None], columns]


# --- kinds of removal -----------------------------------------------------------------------------


def removal(name: str, question: Question, grid: Grid) -> Answer:
    """Return the function that gives the model's logits without some patches.

    - "mask": no attention of the model looks at their tokens (`hide_keys`).
    - "mean": their pixels have the mean colour of all the images of the question.
    - "blur": their pixels are those of the image blurred by a Gaussian, σ a side of a patch.

    Raises:
        ValueError: another name.
        NotAvailableError: the model's tokens cannot be hidden, as `hiding` finds.
    """
    if name not in REMOVALS:
        raise ValueError(f"removals: expected some of {', '.join(REMOVALS)}, got {name!r}")
    if name == "mask":
        return hiding(question, grid)[0]
    images, size = question.images.detach(), question.images.shape[-2:]
    if name == "mean":
        colour = images.mean(dim=(0, 2, 3), keepdim=True)
        return painting(question, grid, lambda images: colour)
    sigma = [max(pixels / places, 1.0) for pixels, places in zip(size, grid, strict=True)]
    # a kernel of ± 2 σ, but not larger than the mirrored image can fill
    kernel = [2 * min(round(2 * s), n - 1) + 1 for s, n in zip(sigma, size, strict=True)]
    widths_first = kernel[::-1], sigma[::-1]
    return painting(question, grid, lambda images: gaussian_blur(images, *widths_first))


def available(
    names: Sequence[str], question: Question, grid: Grid
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Return the kinds of removal that the model allows, and the reasons for the others, by name.

    Raises:
        ValueError: another name.
        NotAvailableError: the model allows none of them.
    """
    ways: dict[str, Answer] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            ways[name] = removal(name, question, grid)
        except NotAvailableError as error:
            reasons[name] = str(error)
    if not ways:
        name, reason = next(iter(reasons.items()))
        raise NotAvailableError(f"removals: {name!r} is not available; {reason}; take 'mean'")
    return ways, reasons


def painting(question: Question, grid: Grid, paint: Callable[[Images], Tensor]) -> Answer:
    """Return the removal that paints over the pixels of patches.

    Args:
        paint: function from images to the paint, of the images' size or a colour
            [batch or 1, channels, 1, 1].
    """
    pixels = pixels_of(question, grid)
    return lambda images, removed: logits_of(
        question.model(torch.where(pixels(removed), paint(images), images))
    )


def pixels_of(question: Question, grid: Grid) -> Callable[[Places], Tensor]:
    """Return the function from removed places of a grid to their pixels, [batch, 1, height, width].

    Places that consist of the model's patches have the pixels that the patch embedding reads.
    """
    height, width = question.images.shape[-2:]
    patches = patch_grid(question.model, question.images)
    covered = None
    if patches is not None and patches.are_in(grid):
        covered = patches.covered
    return lambda removed: as_pixels(removed, grid, (height, width), covered)


def hiding(question: Question, grid: Grid | None = None) -> tuple[Answer, Grid]:
    """Return the removal that hides tokens from all attention, and the grid of the places.

    It is tested first: half of the patches are hidden and their pixels replaced by noise. If the
    logits change with the noise, hidden patches still reach them, through a mean over all tokens, a
    convolution, or attention that is not visible. The logits must change with the hiding itself.

    Args:
        grid: grid of the places, each of which consists of patches; None: that of the patches.

    Raises:
        NotAvailableError: hidden patches still have an effect, or the patches are not known.
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
            return logits_of(question.model(images.clone()))  # the model may write to its input

    generator = torch.Generator().manual_seed(0)
    places = rows * columns
    half = torch.rand(len(images), places, generator=generator).argsort(dim=1) < (places + 1) // 2
    half = half.to(images.device)
    spread = images.std() or 1.0  # an image of one colour has a deviation of 0
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
    """Return the grid of the patches among the keys of the model's first attention."""
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
