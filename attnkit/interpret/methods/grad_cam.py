"""Grad-CAM: activations weighted by the class's gradient at their channels."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnkit.interpret.methods.grid import Grid, Source, locate, maps_among, settled
from attnkit.interpret.methods.hooks import ModuleRun, module_runs
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import token_layers, watch

_LAST_SHARE = 5  # the layer is among the last fifth of the modules that ran,
_LAST_MODULES = 24  # or, in a small network, among the last 24, which are a block or two


def grad_cam(question: Question) -> Tensor:
    """Grad-CAM (Selvaraju et al., Grad-CAM, 2017), [batch, rows, columns].

        (Σ_c w_c T_c[i])⁺,   w_c = mean_i ∂y/∂T_c[i]

    T are the patches' tokens at the input of the last attention layer between tokens, after the
    block's first norm; after the last block, patches that are not read have no gradient. For a
    model without visible attention, or with attention within windows, T is the last map or tokens
    near the end of the network that a module returns and that have a gradient at more than one
    place. A note names the module.

    `layers` chooses another layer: an attention layer between tokens, or a module that returns
    tokens or a map.

    Raises:
        ValueError: there is no such layer, or it returns neither tokens nor a map.
    """
    layer = question.layers
    if layer is not None and not isinstance(layer, int | str):
        raise ValueError(f"layers: expected one layer for grad_cam, got {layer!r}")
    names = token_layers(question)
    is_counted = not isinstance(layer, str) or any(fnmatchcase(name, layer) for name in names)
    if names and is_counted:
        return _on_tokens(question)
    if isinstance(layer, int):
        raise ValueError(
            f"layers: name a module that returns tokens or a map, since "
            f"{type(question.model).__name__} has no attention between all tokens to count, got "
            f"{layer}"
        )
    return _on_output(question, layer)


def _on_tokens(question: Question) -> Tensor:
    with module_runs(question.model, lambda run: any(t.ndim == 3 for t in run.given)) as runs:
        chain = watch(question, "grad_cam")
    step = [step for step in chain.used if step.rows is not None][-1]
    name = step.call.layer
    # if attention runs in a child module, its input is heads; a parent's input is the tokens
    around = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
    shape = question.batch, step.num_tokens
    fitting = {
        run.name: (tensor, *axes)
        for run in reversed(runs)
        for tensor in reversed(run.given)
        if run.name in around
        and (axes := _axes_of_tokens(tensor, shape, getattr(run.module, "batch_first", True)))
    }
    found = next((each for each in around if each in fitting), None)
    if found is None:
        raise ValueError(
            f"layers: neither the layer {name!r} nor a module around it is given tokens [batch, "
            f"{step.num_tokens}, dim]; name a module that returns tokens or a map"
        )
    tokens, batch, place = fitting[found]
    (gradient,) = question.gradients(chain.y, [tokens])
    question.notes.append(f"tokens given to the module {found!r}")
    return _cam(*(chain.grid.image(t.permute(batch, place, 2)) for t in (tokens, gradient)))


def _axes_of_tokens(
    tensor: Tensor, shape: tuple[int, int], is_batch_first: bool
) -> tuple[int, int] | None:
    """Return the axes of batch and tokens, or None; in torch's default order tokens are first."""
    if tensor.ndim != 3:
        return None
    ways = [axes for axes in ((0, 1), (1, 0)) if tuple(tensor.shape[a] for a in axes) == shape]
    return None if not ways else ways[0] if is_batch_first else ways[-1]


class _Made(NamedTuple):
    """A map or tokens that a module computed from images.

    run: the run of the module.
    number: index of the run among all runs.
    batch, places: the axes of the images, and of rows and columns or of the tokens.
    num_tokens: number of tokens; 0 for a map.
    """

    run: ModuleRun
    number: int
    batch: int
    places: tuple[int, ...]
    num_tokens: int

    def in_order(self, tensor: Tensor) -> Tensor:
        """Permute a tensor of this shape to [batch, *places, channels]."""
        axes = self.batch, *self.places
        (channels,) = {*range(tensor.ndim)}.difference(axes)
        return tensor.permute(*axes, channels)


def _on_output(question: Question, layer: str | None) -> Tensor:
    with module_runs(question.model, lambda run: bool(run.made)) as runs:
        y = question.ask()
    # run a batch of another size: axes that change with it are images, others are parameters
    others = question.images.detach()[:1].repeat(1 if question.batch > 1 else 2, 1, 1, 1)
    others.requires_grad_()
    with module_runs(question.model, lambda run: bool(run.made)) as of_others:
        question.forward(others.clone())
    made = _of_images(runs, of_others, question.images, others)
    first = len(runs) - max(len(runs) // _LAST_SHARE, _LAST_MODULES)
    near_end = [
        each
        for each in made
        if each.number >= first
        # a linear layer's tokens may be keys or values alone, one of several paths to the logits
        and not (each.num_tokens and isinstance(each.run.module, nn.Linear))
    ]
    last = near_end if layer is None else [each for each in made if each.run.name == layer]
    tensors = [each.run.made[0] for each in last]
    gradients = torch.autograd.grad(y.sum(), tensors, allow_unused=True) if tensors else ()
    counts = {each.num_tokens for each in made} - {0}
    grids: dict[int, Grid | None] = {}
    for each, gradient in reversed([*zip(last, gradients, strict=True)]):
        if gradient is None:
            continue
        values, gradient = each.in_order(each.run.made[0]), each.in_order(gradient)
        if each.num_tokens:
            grid = _grid_of_tokens(question, made, of_others, others, each.num_tokens, grids)
            if grid is None:
                continue
            values, gradient = grid.image(values), grid.image(gradient)
            if int((gradient != 0).any(dim=3).flatten(1).sum(dim=1).min()) < 2:
                continue  # after the last attention, patches that are not read
            question.notes.append(str(grid))
        elif counts.intersection(values.shape[1:3]):
            continue  # [batch, heads, …] tensors: attention weights, queries, keys or values
        what = "tokens" if each.num_tokens else "map"
        question.notes.append(f"{what} of the module {each.run.name!r}")
        return _cam(values, gradient)
    what = (
        "no module near the end returns a" if layer is None else f"the module {layer!r} returns no"
    )
    raise ValueError(
        f"layers: {what} map over the image, and no tokens that are known to be its patches, on "
        "which the logits depend; name a module by layers=, give grid= of its tokens, or take "
        "method='input_gradient'"
    )


def _of_images(
    runs: Sequence[ModuleRun], of_others: Sequence[ModuleRun], images: Tensor, others: Tensor
) -> list[_Made]:
    """Return the maps and tokens in the outputs for images and for another number of images."""
    height, width = images.shape[-2:]
    made = []
    for number, (run, other) in enumerate(zip(runs, of_others, strict=False)):
        tensor, shape = run.made[0], other.made[0].shape
        if not tensor.requires_grad or len(shape) != tensor.ndim or run.name != other.name:
            continue
        axes = [
            axis
            for axis in range(min(2, tensor.ndim))
            if tensor.shape[axis] == len(images) and shape[axis] == len(others)
        ]
        if axes and tensor.ndim == 3 and tensor.shape[1 - axes[0]] > 1:
            num_tokens = tensor.shape[1 - axes[0]]
            made.append(_Made(run, number, axes[0], (1 - axes[0],), num_tokens))
        elif axes[:1] == [0] and tensor.ndim == 4:
            # channels are the side that does not fit the proportions of the image
            for places in ((2, 3), (1, 2)):
                rows, columns = (tensor.shape[axis] for axis in places)
                is_close = abs(rows * width - columns * height) < max(height, width)
                if rows * columns > 1 and is_close:
                    made.append(_Made(run, number, 0, places, 0))
                    break
    return made


def _grid_of_tokens(
    question: Question,
    made: Sequence[_Made],
    of_others: Sequence[ModuleRun],
    others: Tensor,
    num_tokens: int,
    grids: dict[int, Grid | None],
) -> Grid | None:
    """Return the grid of `num_tokens` tokens, located on earlier maps and tokens; None: unknown."""
    if num_tokens in grids:
        return grids[num_tokens]
    begin = next(place for place, each in enumerate(made) if each.num_tokens == num_tokens)
    first, found = made[begin], None
    if question.grid is None:
        before = {each.num_tokens: each for each in made[:begin] if each.num_tokens}
        sources = []
        for number, each in reversed(before.items()):
            grid = _grid_of_tokens(question, made, of_others, others, number, grids)
            if grid is not None:
                field = partial(_field_of_tokens, each, grid)
                sources.append(Source(of_others[each.number].made[0], (field,)))
        sources += maps_among(of_others[: first.number], others)
        found = locate(first.in_order(of_others[first.number].made[0]), sources)
    try:
        given = question.grid, question.num_prefix_tokens
        grids[num_tokens] = settled(question.model, others, num_tokens, found, *given)
    except ValueError:
        grids[num_tokens] = None
    return grids[num_tokens]


def _field_of_tokens(each: _Made, grid: Grid, gradient: Tensor) -> Tensor:
    return grid.image(each.in_order(gradient)).sum(dim=(0, 3))


def _cam(values: Tensor, gradient: Tensor) -> Tensor:
    """Return the Grad-CAM map [batch, rows, columns] of [batch, rows, columns, channels]."""
    weights = gradient.mean(dim=(1, 2))
    return torch.einsum("bijc,bc->bij", values.detach(), weights).relu()
