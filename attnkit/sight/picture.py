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

from attnkit.lightning.files import replacing
from attnkit.sight.colours import Scale, as_numbers, overlaid

_SIDE = 2.0  # inches of an image
_LINE = 0.17  # of a title's line
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


def draw(rows: Sequence[Row], across: int = _ACROSS) -> Figure:
    """The rows, each in as many lines of panels as it needs.

    Each place of a map has one colour of the row's scale, whose numbers stand beside it, on the
    image in light tones. Nothing is interpolated.

    Args:
        rows: of one or more panels.
        across: panels of a line, at most.
    """
    columns = min(across, max(len(row.panels) for row in rows))
    shape = next((p.picture.shape for row in rows for p in row.panels if p.picture is not None), ())
    height = _SIDE * shape[0] / shape[1] if shape else _SIDE
    lines = [row._replace(panels=row.panels[start : start + columns])
             for row in rows for start in range(0, len(row.panels), columns)]  # fmt: skip
    around = [max(_room(panel) for panel in line.panels) for line in lines]
    size = (_SIDE * columns + 1.2, height * len(lines) + sum(around) + 0.2)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    heights = [height + more for more in around]
    drawn = iter(figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights))
    for row in rows:
        panels = [panel for _ in range(0, len(row.panels), columns) for panel in next(drawn)]
        for axes in panels:
            axes.axis("off")
        for axes, panel in zip(panels, row.panels, strict=False):
            _draw(axes, panel, row)
        if row.scale is not None and any(_is_map(panel) for panel in row.panels):
            mappable = row.scale.mappable
            bar = figure.colorbar(mappable, ax=panels, shrink=0.9, pad=0.01, label=row.label)
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


def plain(text: str) -> str:
    """For matplotlib, to whom dollar signs would be the ends of a formula."""
    return text.replace("$", r"\$")


def _draw(axes: Any, panel: Panel, row: Row) -> None:
    lines = (line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
             for line in panel.title.split("\n"))  # fmt: skip
    axes.set_title(plain("\n".join(lines)), fontsize=9, loc="left")
    if panel.below:
        at = {"ha": "center", "va": "top", "fontsize": 7, "transform": axes.transAxes}
        axes.text(0.5, -0.04, panel.below, **at)
    if panel.values is None:
        axes.imshow(panel.picture, interpolation="nearest")
        return
    values, scale = as_numbers(panel.values), row.scale
    assert scale is not None
    if values.ndim == 1:
        axes.axis("on")
        axes.step(range(len(values)), values, where="mid", lw=1)
        axes.set(ylim=(scale.low, scale.high), box_aspect=1)
        axes.set_xlabel("channel", fontsize=8)
        axes.set_ylabel(row.label, fontsize=8)
        axes.tick_params(labelsize=7)
    elif panel.picture is None:
        ends = {"vmin": scale.low, "vmax": scale.high}
        axes.imshow(values, cmap=scale.name, interpolation="nearest", **ends)
    else:
        axes.imshow(overlaid(panel.picture, values, scale), interpolation="nearest")


def _is_map(panel: Panel) -> bool:
    return panel.values is not None and panel.values.ndim == 2


def _room(panel: Panel) -> float:
    """Inches above and below it."""
    curve = 0.3 if panel.values is not None and panel.values.ndim == 1 else 0.0
    return _LINE * (1 + panel.title.count("\n") + bool(panel.below)) + 0.1 + curve
