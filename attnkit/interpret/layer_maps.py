"""What a layer of attention, or a gate, does with images: its maps, and a picture of them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnkit.core.capture.weights import capture_attention
from attnkit.core.kernels.record import unrecorded
from attnkit.core.running import module_name
from attnkit.interpret.explain import explain
from attnkit.interpret.methods.grid import find_grid
from attnkit.interpret.picture import OVERLAY, Panel, Row, Scale, as_picture, draw
from attnkit.layers.gates.gate import capture_gates
from attnkit.layers.maps.channel import ChannelAttention, CrossCovarianceAttention
from attnkit.layers.maps.spatial import SpatialAttention
from attnkit.lightning.explained import Explained

_LABELS = {"attention": "attention / uniform attention", "gate": "gate, mean of channels"}
_OVER_CHANNELS = (ChannelAttention, CrossCovarianceAttention)


class LayerMap(NamedTuple):
    """`values` is [rows, columns] over the image, [channels], or [channels, channels].

    `kind` says how to read them: "attention" as a multiple of what uniform attention would give, so
    that 1 is uniform; "gate" between 0 and 1.
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
        ValueError: it has neither, or no such layer.
    """
    modules = {module_name(name): module for name, module in model.named_modules()}
    found = {
        "attention": [
            n for n, m in modules.items() if callable(getattr(m, "attention_weights", None))
        ],
        "gate": [n for n, m in modules.items() if callable(getattr(type(m), "gate", None))],
    }
    kind = next((kind for kind, names in found.items() if names), None)
    if kind is None:
        raise ValueError(
            f"layer: {type(model).__name__} has neither attention with weights nor gates: nothing "
            "to draw; insert_attention puts them in, replace_attention makes timm's visible"
        )
    names = found[kind]
    if isinstance(layer, int):
        chosen = names[layer : layer + 1 or None] if -len(names) <= layer else []
    else:
        chosen = [name for name in names if fnmatchcase(name, layer)]
    if not chosen:
        raise ValueError(f"layer: {layer!r} is none of the {len(names)} layers {', '.join(names)}")
    return kind, chosen


@torch.no_grad()
def layer_maps(model: nn.Module, image: Tensor, layer: int | str) -> tuple[list[LayerMap], Any]:
    """The maps of some layers over an image [channels, height, width], and the model's output."""
    kind, names = chosen_layers(model, layer)
    with ExitStack() as stack:
        stack.enter_context(unrecorded())
        captured: dict[str, list[Tensor]] = stack.enter_context(
            capture_gates(model) if kind == "gate" else capture_attention(model, names)
        )
        output = model(image[None])
    maps = []
    for name in names:
        if name not in captured:
            raise ValueError(f"layer: {name!r} did not run")
        values = captured[name][-1].float().cpu()
        if kind == "gate":
            maps.append(_of_gate(name, values[0]))
        else:
            maps.append(_of_attention(name, model, values, image))
    return maps, output


def _of_gate(name: str, values: Tensor) -> LayerMap:
    if values[0].numel() == 1:
        return LayerMap(name, "gate", values.flatten(), "channels")
    return LayerMap(name, "gate", values.mean(0), "image")


def _of_attention(name: str, model: nn.Module, weights: Tensor, image: Tensor) -> LayerMap:
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
        raise ValueError(
            f"layer: {name!r} attends within {len(weights)} parts of the image, windows or the "
            "like, which are not drawn; take another layer"
        )
    grid = find_grid(model, image[None], num_keys)
    rows = weights[0].mean(0)
    row = rows[0] if grid.num_prefix_tokens and _has_class_token(model) else rows.mean(0)
    values = grid.patches(row, dim=0).reshape(grid.rows, grid.columns)
    took = 1 - float(values.sum()) if grid.num_others else None
    return LayerMap(name, "attention", values * num_keys, "image", took)


def _has_class_token(model: nn.Module) -> bool:
    """Whether the first of the prefix tokens is one, as far as the model says."""
    said = (m for m in model.modules() if isinstance(getattr(m, "num_prefix_tokens", None), int))
    module = next(said, None)
    return getattr(module, "class_token", getattr(module, "cls_token", True)) is not None


def draw_layer(given: Explained, layer: int | str) -> tuple[Figure, dict[str, Tensor]]:
    """The picture of what a layer does with images, and its maps [batch, …] by the layer's name.

    For a captioner there is a map of the layer's attention for each word, with the name `words`.

    Args:
        given: a model and images, or a captioner and its sentences.
        layer: a position among the layers, or a name (`*` matches anything, and each layer is a
            row; of a captioner it is the mean over them).

    Raises:
        ValueError: there is no such layer; it did not run, attends within windows, or over tokens
            that are not a grid.
    """
    if given.sentences is not None:
        seen = explain(given.model, given.inputs, given.sentences, "attention", layers=layer)
        assert seen.words is not None
        return seen.draw(given.words or None, given.pictures), {"words": seen.words}
    found = [layer_maps(given.model, image, layer) for image in given.inputs]
    maps = [one for one, _ in found]
    titles = [_title(given, number, output) for number, (_, output) in enumerate(found)]
    pictures = given.inputs if given.pictures is None else given.pictures
    layers = {row[0].layer: torch.stack([one.values for one in row])
              for row in zip(*maps, strict=True)}  # fmt: skip
    return draw_layers(pictures, maps, titles), layers


def first_of(given: Explained) -> Explained:
    """The first image alone, to learn whether a layer can be drawn."""
    pictures = None if given.pictures is None else given.pictures[:1]
    said = None if given.sentences is None else given.sentences[:1]
    return replace(given, inputs=given.inputs[:1], pictures=pictures, sentences=said)


def _title(given: Explained, number: int, output: Any) -> str:
    """The image's name, its class, and the one that logits predict."""
    lines = ["/".join(Path(given.names[number]).parts[-2:])] if given.names else []
    if given.truth is not None:
        lines.append(f"true: {given.class_name(int(given.truth[number]))}")
    if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1:
        lines.append(f"predicted: {given.class_name(int(output[0].argmax()))}")
    return "\n".join(lines)


def draw_layers(
    images: Tensor, maps: Sequence[Sequence[LayerMap]], titles: Sequence[str]
) -> Figure:
    """A column for each image: the image, and a row for each layer with its scale.

    Attention is shown as a multiple of uniform attention, gates between 0 and 1: a uniform map
    has one colour.

    Args:
        images: [batch, channels, height, width], uint8, or floats of any range.
        maps: for each image, the maps of the layers.
        titles: for each image.
    """
    pictures = [as_picture(image) for image in images]
    rows = [Row([Panel(one, title=said) for one, said in zip(pictures, titles, strict=True)])]
    for layers in zip(*maps, strict=True):
        first = layers[0]
        largest = max(float(one.values.max()) for one in layers)
        scale = Scale(0.0, 1.0 if first.kind == "gate" else max(2.0, largest), OVERLAY)
        label = first.kind if first.over == "channels" else _LABELS[first.kind]
        panels = [_panel(*both) for both in zip(layers, pictures, strict=True)]
        panels[0] = panels[0]._replace(title=first.layer)  # once for the row
        rows.append(Row(panels, scale, label))
    return draw(rows, across=len(images))


def _panel(one: LayerMap, picture: np.ndarray) -> Panel:
    took = "" if one.prefix is None else f"class and register tokens: {100 * one.prefix:.0f} %"
    return Panel(picture if one.over == "image" else None, one.values, below=took)
