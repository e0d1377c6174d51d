"""What the answer loses when a patch is taken away."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.arguments import at_least, choice
from attnkit.core.hidden import hide_keys
from attnkit.interpret.methods.grid import patch_grid
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import Chain, has_token_attention, watch
from attnkit.interpret.progress import shown

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

    Without a patch no attention looks at its token, where the model's attention can be masked and
    nothing else reads patches; else it has one colour, which is an image that no one ever saw. A
    note says which.

    Args:
        removal: "tokens" or "colour"; None: as above.
        baseline: the colour, a number or [channels]; None: the image's own mean colour.
        patch: height and width in pixels of what is given one colour; None: the model's
            `patch_size`.
        batch_size: images to a forward. It takes one image for each patch of each image.
    """
    at_least(1, batch_size=batch_size)
    choice((*get_args(Removal), None), removal=removal)
    coloured = {"baseline": baseline, "patch": patch}
    for name, given in coloured.items():
        if given is not None and removal == "tokens":
            raise ValueError(f"{name}: only removal='colour' has one, got {given!r} with 'tokens'")
    chain = None
    if removal != "colour" and all(given is None for given in coloured.values()):
        chain = _maskable(question, is_asked=removal == "tokens")
    if chain is not None:
        grid = chain.grid.rows, chain.grid.columns
        question.notes.append("patches hidden from all attention")
        without = _hidden(question, chain)
    else:
        grid = _grid(question, patch)
        question.notes.append(
            "patches given " + ("the image's mean colour" if baseline is None else "the baseline")
        )
        without = _coloured(question, grid, baseline)
    with torch.no_grad():
        before = question.ask()
        places = torch.eye(grid[0] * grid[1], dtype=torch.bool, device=before.device)
        at_once = max(1, batch_size // question.batch)
        after = [
            without(some).unflatten(0, (len(some), question.batch))
            for some in shown(places.split(at_once), "occlusion")
        ]
    return (before - torch.cat(after)).T.unflatten(1, grid)


def _maskable(question: Question, *, is_asked: bool) -> Chain | None:
    """The model's attention, if a hidden patch is then gone from y."""
    if has_token_attention(question):
        chain = watch(question, "occlusion")
        last = chain.steps[-1]
        is_read = chain.start.any(dim=0).nonzero()[:, 0]
        if last.rows is None or bool((last.rows[is_read] < chain.grid.num_prefix_tokens).all()):
            return chain
        question.notes.clear()
        question.chain = None
    if is_asked:
        raise ValueError(
            "removal: tokens can be hidden only where attention reads all of an image and a class "
            "token or an attention pooling is read in the end; take removal='colour'"
        )
    return None


def _hidden(question: Question, chain: Chain) -> Callable[[Tensor], Tensor]:
    """y [places · batch] without each of some places, one hot [places, patches]."""

    def without(places: Tensor) -> Tensor:
        images = question.images.detach().repeat(len(places), 1, 1, 1)
        hidden = places.repeat_interleave(question.batch, dim=0)
        with hide_keys(hidden, chain.grid.num_prefix_tokens) as hiding:
            y = question.ask(images)
        assert not hiding.passed, hiding.passed
        return y

    return without


def _coloured(
    question: Question, grid: tuple[int, int], baseline: float | Tensor | None
) -> Callable[[Tensor], Tensor]:
    """As `_hidden`, with the places in one colour."""
    images = question.images.detach()
    colour = colours_of(images, baseline)
    return lambda places: question.ask(in_colour(images, places, grid, colour))


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


def in_colour(images: Tensor, places: Tensor, grid: tuple[int, int], colour: Tensor) -> Tensor:
    """The batch with each of some places, [places, patches], in one colour, one after the other."""
    size = list(images.shape[-2:])
    covered = F.interpolate(places.float().unflatten(1, grid)[:, None], size, mode="nearest")
    return torch.where(covered[:, None] > 0, colour, images).flatten(0, 1)


def _grid(question: Question, patch: int | tuple[int, int] | None) -> tuple[int, int]:
    height, width = question.images.shape[-2:]
    if patch is not None:
        high, wide = (patch, patch) if isinstance(patch, int) else patch
        if high < 1 or wide < 1 or height % high or width % wide:
            raise ValueError(
                f"patch: {patch} does not divide an image of {height} x {width} pixels"
            )
        return height // high, width // wide
    grid = question.grid or patch_grid(question.model, (height, width))
    if grid is None:
        raise ValueError(
            f"patch: {type(question.model).__name__} has no patch_size; give patch=, the side in "
            "pixels of what is taken away"
        )
    if height % grid[0] or width % grid[1]:
        raise ValueError(
            f"grid: {grid[0]} x {grid[1]} does not divide an image of {height} x {width} pixels"
        )
    return grid
