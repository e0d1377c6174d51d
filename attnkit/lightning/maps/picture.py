"""Maps over images as one picture: each image with its title, below it the maps and their scale."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.lightning.maps.layers import LayerMap
from attnkit.lightning.maps.overlay import COLOURS, overlaid, scale

_SIDE = 2.0  # inches of an image
_LONGEST = 22  # characters of a title's line
_SCALES = {
    ("attention", "image"): "attention: 1 is even",
    ("attention", "pairs of channels"): "attention: 1 is even",
    ("gate", "image"): "gate, mean of channels",
    ("gate", "channels"): "gate",
}


def draw_maps(images: Tensor, maps: Sequence[Sequence[LayerMap]], titles: Sequence[str]) -> Figure:
    """A column for each image: the image, and a row for each layer.

    A layer has one scale for all images, which is drawn beside them. Attention is shown as a
    multiple of even attention, gates between 0 and 1: a map that is even has one colour. Maps
    lie on the image in light tones, each place in one colour.

    Args:
        images: [batch, channels, height, width], uint8, or floats of any range.
        maps: for each image, the maps of the layers.
        titles: for each image.
    """
    count, num_layers = len(images), len(maps[0])
    height = _SIDE * images.shape[-2] / images.shape[-1]
    size = (_SIDE * count + 1.2, (height + 0.5) * (1 + num_layers) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(1 + num_layers, count, squeeze=False)
    pictures = [as_picture(image) for image in images]
    for panel, picture, title in zip(panels[0], pictures, titles, strict=True):
        panel.imshow(picture, interpolation="nearest")
        panel.set_title("\n".join(map(_short, title.split("\n"))), fontsize=9)
        panel.axis("off")
    for row, layers in zip(panels[1:], zip(*maps, strict=True), strict=True):
        first = layers[0]
        largest = max(float(one.values.max()) for one in layers)
        top = 1.0 if first.kind == "gate" else max(2.0, largest)
        row[0].set_title(first.layer, fontsize=9, loc="left")
        for panel, picture, one in zip(row, pictures, layers, strict=True):
            _draw(panel, picture, one, top)
        label = _SCALES[first.kind, first.over]
        if first.over == "channels":
            row[0].set_ylabel(label, fontsize=8)
        else:
            figure.colorbar(scale(top), ax=list(row), label=label, shrink=0.9, pad=0.01)
    return figure


def pixels_of(figure: Figure) -> np.ndarray:
    """The picture as uint8 [height, width, 3]."""
    canvas: Any = figure.canvas
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that a font lacks
        canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def _draw(panel: Any, picture: np.ndarray, one: LayerMap, top: float) -> None:
    if one.over == "channels":
        panel.step(range(len(one.values)), one.values.tolist(), where="mid", lw=1)
        panel.set(ylim=(0, 1))
        panel.set_xlabel("channel", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set_box_aspect(picture.shape[0] / picture.shape[1])
        return
    values = one.values.numpy()
    panel.axis("off")
    if one.over == "image":
        panel.imshow(overlaid(picture, values, top), interpolation="nearest")
    else:
        panel.imshow(values, cmap=COLOURS, vmin=0, vmax=top, interpolation="nearest")
    if one.prefix is not None:
        said = f"class and registers took {100 * one.prefix:.0f} %"
        panel.text(0.5, -0.04, said, ha="center", va="top", fontsize=7, transform=panel.transAxes)


def as_picture(image: Tensor) -> np.ndarray:
    """An image of any range as [height, width, 3] in [0, 1]."""
    floats = image.float().cpu()
    if image.dtype == torch.uint8:
        floats = floats / 255
    elif floats.min() < 0 or floats.max() > 1:
        floats = (floats - floats.min()) / (floats.max() - floats.min()).clamp(min=1e-12)
    floats = floats if len(floats) == 3 else floats.mean(0, keepdim=True).expand(3, -1, -1)
    return floats.permute(1, 2, 0).numpy()


def _short(line: str) -> str:
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
    return line.replace("$", "\\$")
