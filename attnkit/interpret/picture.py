"""Colour scales of maps, and pictures with rows of images, their maps and scales."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.lightning.console import in_picture
from attnkit.lightning.files import replacing

SEQUENTIAL, DIVERGING, OVERLAY = "inferno", "RdBu_r", "OrRd"
"""Matplotlib's names of colour maps: perceptually uniform from dark to bright; blue, white at 0,
red; white to dark red."""
_DARKEST = 0.68  # brightness of black under a map, so that colours on dark images can be seen
_LEAST_PIXELS = 240  # enlarged to this, places have equal sides even if they do not divide pixels

_SIDE = 2.0  # width of an image in inches
_GAP, _BAR, _LINE = 0.1, 0.9, 0.16  # inches between images, for a scale, of a title's line
_LONGEST = 28  # characters of a title's line
_ACROSS = 6  # panels in a line


class Scale(NamedTuple):
    """A colour scale; numbers beyond an end have that end's colour."""

    low: float
    high: float
    name: str = SEQUENTIAL

    def levels(self, values: Tensor | np.ndarray) -> np.ndarray:
        """Return numbers as indices of the palette, uint8 of the same shape."""
        numbers = as_numbers(values)
        shares = (numbers - self.low) / ((self.high - self.low) or 1.0)
        return np.round(255 * shares.clip(0, 1)).astype(np.uint8)

    @property
    def mappable(self) -> ScalarMappable:
        """The matplotlib object for a colour bar."""
        return ScalarMappable(Normalize(self.low, self.high), self.name)

    @property
    def palette(self) -> np.ndarray:
        """The 256 colours from the lowest to the highest, uint8 [256, 3]."""
        colours = matplotlib.colormaps[self.name](np.arange(256))[:, :3]
        return np.round(255 * colours).astype(np.uint8)


def scale_of(maps: Iterable[Tensor | np.ndarray], *, is_signed: bool = False) -> Scale:
    """Return a shared scale of maps: from 0 to their largest number, or symmetric about 0.

    Only maps on the same scale can be compared by eye, so pass all maps that a reader compares.
    """
    sizes = (float(np.abs(as_numbers(one)).max(initial=0.0)) for one in maps)
    size = max(sizes, default=0.0) or 1.0
    return Scale(-size, size, DIVERGING) if is_signed else Scale(0.0, size)


def as_numbers(values: Tensor | np.ndarray) -> np.ndarray:
    """Return values as a float64 array on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def overlay_scale(maps: Iterable[Tensor | np.ndarray], *, is_signed: bool = False) -> Scale:
    """Return a shared scale of maps that are multiplied onto a light image: 0 is white."""
    low, high, name = scale_of(maps, is_signed=is_signed)
    return Scale(low, high, name if is_signed else OVERLAY)


def overlaid(picture: np.ndarray, values: np.ndarray, scale: Scale) -> np.ndarray:
    """Multiply the colours of a map onto the image in light grey, [height, width, 3] in [0, 1].

    Nothing is interpolated: pixel (y, x) of an image [height, width] has the value of the place
    (y · rows // height, x · columns // width).

    Args:
        picture: [height, width, 3] in [0, 1].
        values: [rows, columns].
        scale: a scale from `overlay_scale`.
    """
    larger = -(-_LEAST_PIXELS // min(picture.shape[:2]))
    grey = picture.mean(axis=-1, keepdims=True).repeat(larger, axis=0).repeat(larger, axis=1)
    rows, columns = (
        np.arange(pixels) * places // pixels
        for pixels, places in zip(grey.shape[:2], values.shape, strict=True)
    )
    colours = scale.mappable.to_rgba(values)[..., :3]
    return (_DARKEST + (1 - _DARKEST) * grey) * colours[rows[:, None], columns]


# --- pictures -------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """An image [height, width, 3] in [0, 1] with a map [rows, columns] on it, or only one of both.

    Values [n] are drawn as a curve.
    """

    picture: np.ndarray | None
    values: Tensor | None = None
    title: str = ""
    below: str = ""


class Row(NamedTuple):
    """Panels that share a scale, and the label of the scale."""

    panels: Sequence[Panel]
    scale: Scale | None = None
    label: str = ""


def draw(rows: Sequence[Row], across: int = _ACROSS) -> Figure:
    """Draw the rows, each in as many lines of panels as it needs.

    Each place of a map has one colour of the row's scale, drawn on the light image. The scale is
    drawn beside the row. Nothing is interpolated.

    Args:
        rows: rows of one or more panels.
        across: maximum number of panels in a line.
    """
    columns = min(across, max(len(row.panels) for row in rows))
    lines = [
        (row, row.panels[at : at + columns])
        for row in rows
        for at in range(0, len(row.panels), columns)
    ]
    every = [panel for row in rows for panel in row.panels]
    shape = next((panel.picture.shape for panel in every if panel.picture is not None), ())
    height = _SIDE * shape[0] / shape[1] if shape else _SIDE
    above = 0.07 + _LINE * max(1 + panel.title.count("\n") for panel in every)
    below = 0.05 + max(0.45 if _is_curve(one) else _LINE * bool(one.below) for one in every)
    step = above + height + below
    wide = columns * (_SIDE + _GAP) + (_BAR if any(row.scale for row in rows) else 0)
    tall = _GAP + len(lines) * step
    figure = Figure(figsize=(wide, tall))
    FigureCanvasAgg(figure)  # no global state, no display

    def axes(x: float, y: float, width: float, height: float) -> Any:
        """Add axes at a position in inches from the left and the top.

        A layout engine would take most of the time of a drawing.
        """
        return figure.add_axes((x / wide, 1 - (y + height) / tall, width / wide, height / tall))

    tops = [_GAP + number * step + above for number in range(len(lines))]
    for (row, panels), top in zip(lines, tops, strict=True):
        # a single title may use the width of the whole line
        alone = sum(bool(panel.title) for panel in panels) == 1
        longest = columns * _LONGEST if alone else _LONGEST
        for place, panel in enumerate(panels):
            margin = 0.45 if _is_curve(panel) else 0.0  # room for the axis labels
            left = place * (_SIDE + _GAP) + _GAP / 2 + margin
            _draw(axes(left, top, _SIDE - margin, height), panel, row, longest)
    for row in rows:
        if row.scale is not None and not _is_curve(row.panels[-1]):
            of_row = [top for top, (other, _) in zip(tops, lines, strict=True) if other is row]
            tall_bar = of_row[-1] + height - of_row[0]
            beside = axes(columns * (_SIDE + _GAP) + 0.05, of_row[0], 0.14, tall_bar)
            bar = figure.colorbar(row.scale.mappable, cax=beside)
            bar.set_label(row.label, fontsize=7)  # labels are not longer than a row is high
            bar.ax.tick_params(labelsize=7)
    return figure


def save(path: Path, figure: Figure) -> None:
    """Write a picture atomically: the file is complete or missing."""
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120)


def pixels_of(figure: Figure) -> np.ndarray:
    """Return a figure's pixels as uint8 [height, width, 3]."""
    canvas: Any = figure.canvas
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about letters that the font does not have
        canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def as_picture(image: Annotated[Tensor, "channels height width"]) -> np.ndarray:
    """Return an image of any range as [height, width, 3] in [0, 1]."""
    floats = image.detach().float().cpu()
    if image.dtype == torch.uint8:
        floats = floats / 255
    elif floats.min() < 0 or floats.max() > 1:
        floats = (floats - floats.min()) / (floats.max() - floats.min()).clamp(min=1e-12)
    floats = floats if len(floats) == 3 else floats.mean(0, keepdim=True).expand(3, -1, -1)
    return floats.permute(1, 2, 0).numpy()


def _draw(axes: Any, panel: Panel, row: Row, longest: int) -> None:
    lines = (line if len(line) <= longest else f"{line[: longest - 1]}…"
             for line in panel.title.split("\n"))  # fmt: skip
    axes.set_title(in_picture("\n".join(lines)), fontsize=9, loc="left")
    if panel.below:
        at = {"ha": "center", "va": "top", "fontsize": 7, "transform": axes.transAxes}
        axes.text(0.5, -0.04, in_picture(panel.below), **at)
    if not _is_curve(panel):
        axes.axis("off")
    if panel.values is None:
        axes.imshow(panel.picture, interpolation="nearest")
        return
    values, scale = as_numbers(panel.values), row.scale
    assert scale is not None
    if values.ndim == 1:
        axes.step(range(len(values)), values, where="mid", lw=1)
        axes.set(ylim=(scale.low, scale.high))
        axes.set_xlabel("channel", fontsize=8)
        axes.set_ylabel(row.label, fontsize=8)
        axes.tick_params(labelsize=7)
    elif panel.picture is None:
        ends = {"vmin": scale.low, "vmax": scale.high}
        axes.imshow(values, cmap=scale.name, interpolation="nearest", **ends)
    else:
        axes.imshow(overlaid(panel.picture, values, scale), interpolation="nearest")


def _is_curve(panel: Panel) -> bool:
    return panel.values is not None and panel.values.ndim == 1
