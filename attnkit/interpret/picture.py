"""Maps in colours, and as one picture: rows of images with maps on them, and the scale of each."""

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
"""Matplotlib's names: even steps to the eye from dark to bright; blue, white at 0, red; white to
dark red."""
_DARKEST = 0.68  # what black becomes: dark images stay bright, and light ones visible
_LEAST_PIXELS = 240  # so that places that do not divide the pixels have even sides

_SIDE = 2.0  # inches of an image
_GAP, _BAR, _HEADING = 0.1, 0.9, 0.3  # beside it, for a scale's numbers, above all
_LINE = 0.16  # of a title's line
_LONGEST = 32  # characters of it
_ACROSS = 6  # panels beside each other


class Scale(NamedTuple):
    """Which numbers have which colours; what lies beyond an end has that end's colour."""

    low: float
    high: float
    name: str = SEQUENTIAL

    def levels(self, values: Tensor | np.ndarray) -> np.ndarray:
        """Numbers as places on the palette, uint8 of the same shape."""
        numbers = as_numbers(values)
        shares = (numbers - self.low) / ((self.high - self.low) or 1.0)
        return np.round(255 * shares.clip(0, 1)).astype(np.uint8)

    @property
    def mappable(self) -> ScalarMappable:
        """What matplotlib makes a colour bar of."""
        return ScalarMappable(Normalize(self.low, self.high), self.name)

    @property
    def palette(self) -> np.ndarray:
        """Its 256 colours from the lowest to the highest, uint8 [256, 3]."""
        colours = matplotlib.colormaps[self.name](np.arange(256))[:, :3]
        return np.round(255 * colours).astype(np.uint8)


def scale_of(maps: Iterable[Tensor | np.ndarray], *, is_signed: bool = False) -> Scale:
    """The scale that maps share: from 0 to their largest number, or evenly about 0.

    Only maps on the same scale can be compared by eye: give all that a reader will compare.
    """
    sizes = (float(np.abs(as_numbers(one)).max(initial=0.0)) for one in maps)
    size = max(sizes, default=0.0) or 1.0
    return Scale(-size, size, DIVERGING) if is_signed else Scale(0.0, size)


def as_numbers(values: Tensor | np.ndarray) -> np.ndarray:
    """On the CPU, float64."""
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def overlay_scale(maps: Iterable[Tensor | np.ndarray], *, is_signed: bool = False) -> Scale:
    """As `scale_of`, for maps multiplied onto an image in light tones: 0 is white."""
    low, high, name = scale_of(maps, is_signed=is_signed)
    return Scale(low, high, name if is_signed else OVERLAY)


def overlaid(picture: np.ndarray, values: np.ndarray, scale: Scale) -> np.ndarray:
    """The colours of a map times the image in light grey, [pixels, pixels, 3] in [0, 1].

    Nothing is interpolated: pixel (y, x) of an image [height, width] has the value of the place
    (y · rows // height, x · columns // width).

    Args:
        picture: [height, width, 3] in [0, 1].
        values: [rows, columns].
        scale: of `overlay_scale`.
    """
    larger = -(-_LEAST_PIXELS // min(picture.shape[:2]))
    grey = picture.mean(axis=-1, keepdims=True).repeat(larger, axis=0).repeat(larger, axis=1)
    rows, columns = (
        np.arange(pixels) * places // pixels
        for pixels, places in zip(grey.shape[:2], values.shape, strict=True)
    )
    colours = scale.mappable.to_rgba(values)[..., :3]
    return (_DARKEST + (1 - _DARKEST) * grey) * colours[rows[:, None], columns]


# --- the picture ----------------------------------------------------------------------------------


class Panel(NamedTuple):
    """An image, [height, width, 3] in [0, 1], and a map [rows, columns] that lies on it; or one of
    both. Values [n] are a curve."""

    picture: np.ndarray | None
    values: Tensor | None = None
    title: str = ""
    below: str = ""


class Row(NamedTuple):
    """Panels that share a scale, and what its numbers are."""

    panels: Sequence[Panel]
    scale: Scale | None = None
    label: str = ""


def draw(rows: Sequence[Row], across: int = _ACROSS, heading: str = "") -> Figure:
    """The rows, each in as many lines of panels as it needs.

    Each place of a map has one colour of the row's scale, whose numbers stand beside it, on the
    image in light tones. Nothing is interpolated.

    Args:
        rows: of one or more panels.
        across: panels of a line, at most.
        heading: above all.
    """
    columns = min(across, max(len(row.panels) for row in rows))
    shape = next((p.picture.shape for row in rows for p in row.panels if p.picture is not None), ())
    height = _SIDE * shape[0] / shape[1] if shape else _SIDE
    cuts = [range(0, len(row.panels), columns) for row in rows]
    lines = [[row.panels[at : at + columns] for at in cut]
             for row, cut in zip(rows, cuts, strict=True)]  # fmt: skip
    tall = sum(_above(line) + height + _below(line) for some in lines for line in some)
    wide = columns * (_SIDE + _GAP) + (_BAR if any(row.scale for row in rows) else 0)
    figure = Figure(figsize=(wide, tall + (_HEADING if heading else _GAP)))
    FigureCanvasAgg(figure)  # no global state, no display

    def axes(x: float, y: float, width: float, height: float) -> Any:
        """A place in inches from the left and the top; a layout engine takes most of a drawing."""
        bottom = figure.get_figheight() - y - height
        return figure.add_axes(
            (x / wide, bottom / figure.get_figheight(), width / wide,
             height / figure.get_figheight())
        )  # fmt: skip

    y = _GAP
    if heading:
        at = 1 - _GAP / figure.get_figheight()
        figure.text(0.5, at, in_picture(heading), fontsize=12, ha="center", va="top")
        y = _HEADING
    for row, some in zip(rows, lines, strict=True):
        first = y + _above(some[0])
        for line in some:
            y += _above(line)
            # a title that stands alone has the room of all
            alone = sum(bool(panel.title) for panel in line) == 1
            longest = columns * _LONGEST + _LONGEST // 3 if alone else _LONGEST
            for number, panel in enumerate(line):
                margin = 0.45 if _is_curve(panel) else 0.0  # for its numbers
                at = number * (_SIDE + _GAP) + _GAP / 2 + margin
                _draw(axes(at, y, _SIDE - margin, height), panel, row, longest)
            y += height + _below(line)
        if row.scale is not None and not _is_curve(row.panels[-1]):
            place = axes(columns * (_SIDE + _GAP) + 0.05, first, 0.14, y - _below(some[-1]) - first)
            bar = figure.colorbar(row.scale.mappable, cax=place)
            bar.set_label(row.label, fontsize=7)  # which is not longer than a row is high
            bar.ax.tick_params(labelsize=7)
    return figure


def save(path: Path, figure: Figure) -> None:
    """Write a picture; the file is there whole or not at all."""
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120)


def pixels_of(figure: Figure) -> np.ndarray:
    """The picture as uint8 [height, width, 3]."""
    canvas: Any = figure.canvas
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that a font lacks
        canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def as_picture(image: Annotated[Tensor, "channels height width"]) -> np.ndarray:
    """An image of any range as [height, width, 3] in [0, 1]."""
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


def _above(line: Sequence[Panel]) -> float:
    """Inches for titles."""
    return 0.07 + _LINE * max(1 + panel.title.count("\n") for panel in line)


def _below(line: Sequence[Panel]) -> float:
    """Inches for what is said below, or a curve's numbers."""
    return 0.05 + max(0.45 if _is_curve(panel) else _LINE * bool(panel.below) for panel in line)
