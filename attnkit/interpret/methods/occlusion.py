"""What the answer loses when a patch is taken away."""

from typing import Literal, get_args

import torch
from torch import Tensor

from attnkit.core.arguments import at_least, choice
from attnkit.interpret.methods.gradients import pixels_of_place
from attnkit.interpret.methods.grid import patch_grid, token_grids
from attnkit.interpret.methods.question import Question, logits_of
from attnkit.interpret.progress import shown
from attnkit.interpret.trust.removal import NotAvailableError, hiding, pixels_of

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

    Without a patch no attention looks at its token, where it was tried on the model that nothing
    of a hidden patch is left, as `attnkit.trust` does; else it has one colour, which is an image
    that no one ever saw. Notes say which, and why.

    Args:
        removal: "tokens" or "colour"; None: as above.
        baseline: the colour, a number or [channels]; None: the image's own mean colour.
        patch: height and width in pixels of what is given one colour; None: those of the model's
            patches.
        batch_size: images to a forward. It takes one image for each patch of each image.
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
        pixels = pixels_of(question, grid)

        def paint(images: Tensor, removed: Tensor) -> Tensor:
            painted = torch.where(pixels(removed), colours_of(images, baseline), images)
            return logits_of(question.model(painted))

        answer = paint

    with torch.no_grad():
        before = question.ask()
        assert question.target is not None
        places = torch.eye(grid[0] * grid[1], dtype=torch.bool, device=before.device)
        after = []
        for some in shown(places.split(max(1, batch_size // question.batch)), "occlusion"):
            images = question.images.detach().repeat(len(some), 1, 1, 1)
            logits = answer(images, some.repeat_interleave(question.batch, dim=0))
            y = logits.gather(1, question.target.repeat(len(some))[:, None])
            after.append(y.unflatten(0, (len(some), question.batch))[:, :, 0])
    return (before - torch.cat(after)).T.unflatten(1, grid)


def colours_of(images: Tensor, baseline: float | Tensor | None) -> Tensor:
    """The colour that is put in place of a patch of each image, [batch, channels, 1, 1]."""
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
    if question.grid is not None:
        pixels_of_place(question.grid, height, width)
        return question.grid
    patches = patch_grid(question.model, question.images)
    if patches is not None:
        return patches.grid
    for tokens in token_grids(question.model, question.images, num_tokens=0).values():
        if tokens is not None and not (height % tokens.rows or width % tokens.columns):
            return tokens.rows, tokens.columns
    raise ValueError(
        f"patch: {type(question.model).__name__} has no patches that are known; give patch=, the "
        "side in pixels of what is taken away"
    )
