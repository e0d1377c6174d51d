"""Grad-CAM: the channels that the class depends on, at the places where they are active."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from attnkit.core.running import module_name
from attnkit.interpret.methods.question import Question
from attnkit.interpret.methods.tokens import has_token_attention, watch


def grad_cam(question: Question) -> Tensor:
    """Grad-CAM (Selvaraju et al., Grad-CAM, 2017), [batch, rows, columns].

        (Σ_c w_c T_c[i])⁺,   w_c = mean_i ∂y/∂T_c[i]

    T are the patches' tokens that the last layer of attention between tokens is given, behind the
    block's first norm: after the last block patches that no one reads have no gradient. Of a model
    without attention, or whose attention sees windows, T is its last map over the image with more
    than one place.
    `layers` names another: a layer of attention between tokens, else a module that returns a map.
    """
    layer = question.layers
    if layer is not None and not isinstance(layer, int | str):
        raise ValueError(f"layers: expected one layer for grad_cam, got {layer!r}")
    if has_token_attention(question):
        return _on_tokens(question)
    return _on_map(question, layer)


def _on_tokens(question: Question) -> Tensor:
    chain = watch(question, "grad_cam")
    step = [step for step in chain.used if step.rows is not None][-1]
    given: list[Tensor] = []

    def hook(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.extend(t for t in [*args, *kwargs.values()] if isinstance(t, Tensor) and t.ndim == 3)

    handle = question.module(step.call.layer).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        y = question.ask()
    finally:
        handle.remove()
    tokens = next((t for t in given if t.shape[1] == step.num_tokens), None)
    if tokens is None:
        raise ValueError(
            f"layers: the layer {step.call.layer!r} is not given tokens [batch, "
            f"{step.num_tokens}, dim]; name another one"
        )
    (gradient,) = question.gradients(y, [tokens])
    first = chain.grid.num_prefix_tokens
    cam = _cam(tokens.detach()[:, first:], gradient[:, first:])
    return cam.unflatten(1, (chain.grid.rows, chain.grid.columns))


def _on_map(question: Question, layer: int | str | None) -> Tensor:
    if isinstance(layer, int):
        raise ValueError(
            f"layers: name the module of the map, since {type(question.model).__name__} has no "
            f"attention between all tokens to count, got {layer}"
        )
    height, width = question.images.shape[-2:]
    maps: dict[str, Tensor] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: object, args: object, output: Any) -> None:
            channels_first = _channels_first(output, height, width)
            if channels_first is not None and _is_map(output, question.batch):
                maps.pop(name, None)
                maps[name] = output

        return hook

    with ExitStack() as stack:
        for name, module in question.model.named_modules():
            handle = module.register_forward_hook(remember(module_name(name)))
            stack.callback(handle.remove)
        y = question.ask()
    name = layer if layer is not None else next(reversed(maps), "")
    if name not in maps:
        what = f"the module {name!r} returns no" if layer is not None else "no module returns a"
        raise ValueError(f"layers: {what} map over the image, which grad_cam needs")
    question.notes.append(f"map of the module {name!r}")
    output = maps[name]
    (gradient,) = question.gradients(y, [output])
    channels = 1 if _channels_first(output, height, width) else 3
    places = [d for d in (1, 2, 3) if d != channels]
    tokens, gradient = (
        t.detach().permute(0, *places, channels).flatten(1, 2) for t in (output, gradient)
    )
    return _cam(tokens, gradient).unflatten(1, (output.shape[places[0]], output.shape[places[1]]))


def _is_map(output: Tensor, batch: int) -> bool:
    """Whether an output in the graph is of the batch's images, and no table, and no weights."""
    if not output.requires_grad or len(output) != batch:
        return False
    sums = output.detach().sum(dim=-1)
    return not torch.allclose(sums, torch.ones_like(sums))


def _channels_first(output: Any, height: int, width: int) -> bool | None:
    """Whether [batch, channels, rows, columns], or channels last; None: no map over the image."""
    if not isinstance(output, Tensor) or output.ndim != 4 or not output.is_floating_point():
        return None
    for channels_first, (rows, columns) in (
        (True, output.shape[2:]),
        (False, output.shape[1:3]),
    ):
        if rows * columns > 1 and abs(rows * width - columns * height) < max(height, width):
            return channels_first
    return None


def _cam(tokens: Tensor, gradient: Tensor) -> Tensor:
    return torch.einsum("bic,bc->bi", tokens, gradient.mean(dim=1)).relu()
