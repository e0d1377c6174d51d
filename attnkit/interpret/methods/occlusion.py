"""Occlusion: what the answer loses without each patch."""

from typing import Literal, get_args

import torch
from torch import Tensor

from attnkit.core.arguments import at_least, choice
from attnkit.interpret.methods.gradients import pixels_of_place
from attnkit.interpret.methods.grid import patch_grid, token_grids
from attnkit.interpret.methods.question import Question
from attnkit.interpret.trust.curves import answers_without_each, of_images
from attnkit.interpret.trust.removal import NotAvailableError, hiding, painting

Removal = Literal["tokens", "colour"]


def occlusion(
    question: Question,
    *,
    removal: Removal | None = None,
    baseline: float | Tensor | None = None,
    patch: int | tuple[int, int] | None = None,
    batch_size: int = 64,
) -> Tensor:
    """Leave-one-out (Zeiler and Fergus, Visualizing and Understanding Convolutional Networks,
    2014), [batch, rows, columns], signed.

        y(x) − y(x without the patch)

    A patch is removed by hiding its token from all attention, if a test on the model shows that
    hidden patches have no effect, as in `attnkit.trust`; otherwise by giving it one colour, which
    makes an image unlike those of the training. Notes report which, and why.

    Args:
        removal: "tokens" or "colour"; None: as above.
        baseline: the colour, a number or [channels]; None: the image's mean colour.
        patch: height and width in pixels of the coloured area; None: those of the model's patches.
        batch_size: images per forward. One image is needed for each patch of each image.
    """
    at_least(1, batch_size=batch_size)
    choice((*get_args(Removal), None), removal=removal)
    coloured = {"baseline": baseline, "patch": patch}
    for name, given in coloured.items():
        if given is not None and removal == "tokens":
            raise ValueError(f"{name}: only removal='colour' has one, got {given!r} with 'tokens'")
    hidden = None
    if removal != "colour" and all(given is None for given in coloured.values()):
        try:
            hidden = hiding(question, question.grid)
        except NotAvailableError as error:
            if removal == "tokens":
                raise ValueError(
                    f"removal: tokens cannot be hidden, {error}; take removal='colour'"
                ) from None
            question.notes.append(f"patches not hidden: {error}")
    if hidden is not None:
        answer, grid = hidden
        question.notes.append("patches hidden from all attention")
    else:
        grid = _grid(question, patch)
        question.notes.append(
            "patches given " + ("the image's mean colour" if baseline is None else "the baseline")
        )
        answer = painting(question, grid, lambda images: colours_of(images, baseline))
    with torch.no_grad():
        question.ask()
    without, places = of_images(question, answer), grid[0] * grid[1]
    y, _, _ = answers_without_each(question, without, places, batch_size, "occlusion")
    return (y[0] - y[1:]).T.unflatten(1, grid)


def colours_of(images: Tensor, baseline: float | Tensor | None) -> Tensor:
    """Return the colour that replaces a patch of each image, [batch, channels, 1, 1]."""
    if baseline is None:
        return images.mean(dim=(2, 3), keepdim=True)
    given = torch.as_tensor(baseline, dtype=images.dtype, device=images.device).reshape(-1)
    if len(given) not in (1, images.shape[1]):
        raise ValueError(
            f"baseline: expected a number or {images.shape[1]}, one for each channel, got "
            f"{len(given)}"
        )
    return given[None, :, None, None].expand(len(images), images.shape[1], 1, 1)


def _grid(question: Question, patch: int | tuple[int, int] | None) -> tuple[int, int]:
    height, width = question.images.shape[-2:]
    if patch is not None:
        high, wide = (patch, patch) if isinstance(patch, int) else patch
        if high < 1 or wide < 1 or height % high or width % wide:
            raise ValueError(
                f"patch: {patch} does not divide an image of {height} x {width} pixels"
            )
        return height // high, width // wide
    patches = patch_grid(question.model, question.images)
    if question.grid is not None:
        if patches is None or not patches.are_in(question.grid):
            pixels_of_place(question.grid, height, width)
        return question.grid
    if patches is not None:
        return patches.grid
    for tokens in token_grids(question.model, question.images, num_tokens=0).values():
        if tokens is not None and not (height % tokens.rows or width % tokens.columns):
            return tokens.rows, tokens.columns
    raise ValueError(
        f"patch: {type(question.model).__name__} has no patches that are known; give patch=, the "
        "side in pixels of what is taken away"
    )
