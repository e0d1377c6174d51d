"""A picture of maps: each image, its map on its own grid with its scale, and the numbers."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.lightning.files import replacing
from attnkit.lightning.maps.picture import as_picture
from attnkit.sight.colours import as_numbers, scale_of

_SIDE = 2.4  # inches of an image
_SMALL = 1.6  # of one of many


def draw_maps(
    images: Tensor,
    maps: Sequence[Sequence[Tensor]],
    captions: Sequence[str],
    titles: Sequence[Sequence[str]],
    *,
    name: str,
    is_signed: bool,
) -> Figure:
    """A row for each image: the image, and its maps with nearest places and the scale of the row.

    A map without signs is drawn from 0, one with signs evenly about 0.

    Args:
        images: [batch, channels, height, width], of any range.
        maps: for each image, some maps [rows, columns].
        captions: above each image.
        titles: above each map.
        name: of the numbers, beside the scale.
    """
    count, most = len(images), max(map(len, maps), default=0)
    side = _SIDE if most < 2 else _SMALL
    height = side * images.shape[-2] / images.shape[-1]
    size = ((1 + most) * side + 1.2, (height + 0.45) * count + 0.2)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    panels = figure.subplots(count, 1 + most, squeeze=False)
    for row, image, some, caption, words in zip(
        panels, images, maps, captions, titles, strict=True
    ):
        for panel in row:
            panel.axis("off")
        picture = as_picture(image)
        row[0].imshow(picture)
        row[0].set_title(caption, fontsize=8, loc="left")
        scale = scale_of(some, is_signed=is_signed)
        high, wide = picture.shape[:2]
        shown = None
        for panel, one, word in zip(row[1:], some, words, strict=False):
            shown = panel.imshow(
                as_numbers(one), cmap=scale.name, vmin=scale.low, vmax=scale.high,
                interpolation="nearest", extent=(-0.5, wide - 0.5, high - 0.5, -0.5),
            )  # fmt: skip
            panel.set_title(word.replace("$", "\\$"), fontsize=8)
        if shown is not None:
            bar = figure.colorbar(shown, ax=row[-1], shrink=0.9, pad=0.02, label=name)
            bar.ax.tick_params(labelsize=7)
    return figure


def save(path: Path, figure: Figure) -> None:
    """Write a picture; the file is there whole or not at all."""
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120)
