"""What a layer of attention, or a gate, makes of one image, in a form that can be drawn."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import module_name
from attnkit.core.watch.capture import capture_attention
from attnkit.core.watch.taps.call import AttentionCall
from attnkit.core.watch.taps.watch import watch_attention
from attnkit.layers.gates.gate import capture_gates
from attnkit.layers.maps.channel import ChannelAttention, CrossCovarianceAttention
from attnkit.layers.maps.spatial import SpatialAttention
from attnkit.lightning.errors import UserError

MAX_PREFIX_TOKENS = 16  # class and register tokens tried for a model that does not say
_WEIGHTS = "attention_weights"
_OVER_CHANNELS = (ChannelAttention, CrossCovarianceAttention)


class LayerMap(NamedTuple):
    """`values` is [rows, columns] over the image, [channels], or [channels, channels].

    `kind` says how to read them: "attention" as a multiple of what even attention would give, so
    that 1 is even; "gate" between 0 and 1.
    """

    layer: str
    kind: str
    values: Tensor
    over: str
    """Over what: "image", "channels" or "pairs of channels"."""
    prefix: float | None = None
    """Of attention over tokens, what the class and register tokens before the image took."""


def chosen_layers(model: nn.Module, layer: int | str) -> tuple[str, list[str]]:
    """Whether a model is looked at by its "attention" or its "gate"s, and the names of the layers.

    Gates are looked at where there is no attention.

    Args:
        model: any module.
        layer: a position among the layers, or a name (`*` matches anything).

    Raises:
        UserError: it has neither, or no such layer.
    """
    modules = {module_name(name): module for name, module in model.named_modules()}
    found = {
        "attention": [n for n, m in modules.items() if callable(getattr(m, _WEIGHTS, None))],
        "gate": [n for n, m in modules.items() if callable(getattr(type(m), "gate", None))],
    }
    kind = next((kind for kind, names in found.items() if names), None)
    if kind is None:
        raise UserError(
            f"{type(model).__name__} has neither attention with weights nor gates: nothing to draw"
            "\n  insert_attention puts them in; replace_attention makes those of timm's looked into"
        )
    names = found[kind]
    if isinstance(layer, int):
        chosen = names[layer : layer + 1 or None] if -len(names) <= layer else []
    else:
        chosen = [name for name in names if fnmatchcase(name, layer)]
    if not chosen:
        raise UserError(f"layer: {layer!r} is none of the {len(names)} layers {', '.join(names)}")
    return kind, chosen


@torch.no_grad()
def layer_maps(
    model: nn.Module, image: Tensor, layer: int | str, num_prefix_tokens: int | None
) -> tuple[list[LayerMap], Any]:
    """The maps of some layers over an image [channels, height, width], and the model's output."""
    kind, names = chosen_layers(model, layer)
    prefix = prefix_of(model, num_prefix_tokens)
    with ExitStack() as stack:
        stack.enter_context(unrecorded())
        captured: dict[str, list[Tensor]] = stack.enter_context(
            capture_gates(model) if kind == "gate" else capture_attention(model, names)
        )
        output = model(image[None])
    maps = []
    for name in names:
        if name not in captured:
            raise UserError(f"layer: {name!r} did not run")
        values = captured[name][-1].float().cpu()
        if kind == "gate":
            maps.append(_of_gate(name, values[0]))
        else:
            maps.append(_of_attention(name, model, values, image, prefix))
    return maps, output


def _of_gate(name: str, values: Tensor) -> LayerMap:
    if values[0].numel() == 1:
        return LayerMap(name, "gate", values.flatten(), "channels")
    return LayerMap(name, "gate", values.mean(0), "image")


def _of_attention(
    name: str, model: nn.Module, weights: Tensor, image: Tensor, prefix: tuple[int | None, bool]
) -> LayerMap:
    layer, around = (model.get_submodule(path) for path in (name, name.rpartition(".")[0]))
    num_keys = weights.shape[-1]
    if isinstance(layer, _OVER_CHANNELS):
        pairs = weights[0].mean(0) * num_keys
        return LayerMap(name, "attention", pairs, "pairs of channels")
    if isinstance(around, SpatialAttention) and around.pattern == "axial":
        lines = weights.mean(dim=(1, 2)) * num_keys  # each row or column is an item of the batch
        is_column = layer is around.column_attention
        return LayerMap(name, "attention", lines.T if is_column else lines, "image")
    if len(weights) > 1:
        raise UserError(
            f"layer: {name!r} attends within {len(weights)} parts of the image, windows or the "
            "like, which are not drawn; inspect.layer or the argument layer chooses another"
        )
    values = over_image(weights[0].mean(0), image, prefix)
    took = 1 - float(values.sum()) if values.numel() < num_keys else None
    return LayerMap(name, "attention", values * num_keys, "image", took)


def over_image(weights: Tensor, image: Tensor, prefix: tuple[int | None, bool]) -> Tensor:
    """Weights [queries, keys] as the map of the class token, or of the mean query, over an image.

    Args:
        weights: the mean over the heads.
        image: [channels, height, width].
        prefix: what `prefix_of` gives.
    """
    told, has_class_token = prefix
    # An attention pooling leaves the prefix out.
    tried = [told, 0] if told is not None else range(MAX_PREFIX_TOKENS + 1)
    height, width = image.shape[-2:]
    number, grid = find_grid(weights.shape[-1], height, width, tried)
    tokens = weights[0] if number and has_class_token else weights.mean(0)
    return tokens[number:].reshape(grid)


def prefix_of(model: nn.Module, given: int | None) -> tuple[int | None, bool]:
    """Prefix tokens, None if unknown, and whether the first of them is a class token."""
    for module in model.modules():
        told = getattr(module, "num_prefix_tokens", None)
        if isinstance(told, int):
            class_token = getattr(module, "class_token", getattr(module, "cls_token", True))
            return (told if given is None else given), class_token is not None
    return given, True


def find_grid(
    num_tokens: int, height: int, width: int, num_prefix_tokens: Sequence[int]
) -> tuple[int, tuple[int, int]]:
    """The first of some numbers of prefix tokens that leaves a grid of the image's proportions.

    Returns:
        That number, and the rows and columns of the grid.
    """
    for prefix in num_prefix_tokens:
        rows = round(math.sqrt(max(num_tokens - prefix, 0) * height / width))
        if rows and rows * round(rows * width / height) == num_tokens - prefix:
            return prefix, (rows, (num_tokens - prefix) // rows)
    raise ValueError(
        f"num_prefix_tokens: {num_tokens} tokens do not form a grid over an image of "
        f"{height} x {width} after {' or '.join(map(str, num_prefix_tokens))} prefix tokens"
    )


def rollout(model: nn.Module, image: Tensor, given: int | None) -> tuple[Tensor, int]:
    """Over an image the row that is read of the product over layers of (weights + identity) / 2.

        r ← (r + r A) / 2      from the last layer down, A the mean over heads

    so that no product of layers is held, nor the weights of one. Returns the map [rows, columns],
    and the number of tokens.

    Raises:
        ValueError: layers of different tokens; tokens that are no grid over the image.
    """
    told, has_class_token = prefix_of(model, given)
    with unrecorded(), watch_attention(model) as seen:
        model(image[None])
    calls = [call for call in seen if isinstance(call, AttentionCall)]  # a graph has no image
    last = calls[-1]
    num_tokens = last.num_keys
    tried = [told, 0] if told is not None else range(MAX_PREFIX_TOKENS + 1)
    height, width = image.shape[-2:]
    number, grid = find_grid(num_tokens, height, width, tried)
    r = torch.zeros(1, last.num_queries, device=image.device)
    if number and has_class_token:
        r[:, 0] = 1
    else:
        r += 1 / last.num_queries
    for call in reversed(calls):
        if call.num_keys != num_tokens:
            raise ValueError(
                f"rollout: the layers have different tokens, {call.num_keys} and {num_tokens}"
            )
        moved = call.propagate(r)
        # A last layer computed for the class token only has that one row.
        if call.num_queries == num_tokens or number:
            moved = (moved + nn.functional.pad(r, (0, num_tokens - r.shape[1]))) / 2
        r = moved
    return r[0, number:].reshape(grid), num_tokens
