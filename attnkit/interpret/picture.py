"""Maps as one picture: rows of images with what lies on them, and beside each row its scale."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.interpret.colours import Scale, as_numbers, overlaid
from attnkit.lightning.files import replacing
from attnkit.lightning.telling.text import in_picture

_SIDE = 2.0  # inches of an image
_GAP, _BAR, _HEADING = 0.1, 0.9, 0.3  # beside it, for a scale's numbers, above all
_LINE = 0.16  # of a title's line
_LONGEST = 32  # characters of it
_ACROSS = 6  # panels beside each other


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
            bar = figure.colorbar(row.scale.mappable, cax=place, label=row.label)
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
