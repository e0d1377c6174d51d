"""A picture of maps: each image, its map on its own grid with its scale, and the numbers."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.lightning.files import replacing
from attnkit.lightning.maps.picture import as_picture

_SIDE = 2.4  # inches of an image


def draw_maps(
    images: Tensor, maps: Tensor, captions: Sequence[str], title: str, is_signed: bool
) -> Figure:
    """A row for each image: the image, and its map with nearest places and its own scale.

    A map without signs is drawn from 0, one with signs evenly about 0.
    """
    count = len(images)
    height = _SIDE * images.shape[-2] / images.shape[-1]
    figure = Figure(figsize=(2 * _SIDE + 1.2, (height + 0.45) * count + 0.2), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(count, 2, squeeze=False)
    for (left, right), image, values, caption in zip(panels, images, maps, captions, strict=True):
        picture = as_picture(image)
        left.imshow(picture)
        left.set_title(caption, fontsize=8, loc="left")
        numbers = values.detach().float().cpu().numpy()
        size = float(abs(numbers).max()) or 1.0
        low, colours = (-size, "RdBu_r") if is_signed else (0.0, "inferno")
        high, wide = picture.shape[:2]
        shown = right.imshow(
            numbers, cmap=colours, vmin=low, vmax=size, interpolation="nearest",
            extent=(-0.5, wide - 0.5, high - 0.5, -0.5),
        )  # fmt: skip
        bar = figure.colorbar(shown, ax=right, shrink=0.9, pad=0.02, label=title)
        bar.ax.tick_params(labelsize=7)
        for panel in (left, right):
            panel.axis("off")
    return figure


def save_picture(
    path: str | os.PathLike[str],
    images: Tensor,
    maps: Tensor,
    captions: Sequence[str],
    title: str,
    is_signed: bool,
) -> None:
    """Draw and write the picture; a file is there whole or not at all."""
    figure = draw_maps(images, maps, captions, title, is_signed)
    with replacing(Path(path)) as file:
        figure.savefig(file, format=Path(path).suffix[1:], dpi=120)
