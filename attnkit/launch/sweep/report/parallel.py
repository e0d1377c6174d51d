"""Parallel coordinates: all parameters of a sweep and its metric in one picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnkit.launch.sweep.report.plotting import (
    Scale,
    explain,
    new_figure,
    parameters_of,
    ranked_of,
    save,
    short,
    styled,
)
from attnkit.launch.sweep.report.ranking import Metric, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARALLEL = "parallel.png"


def draw_parallel(path: Path, rows: Sequence[Row], metric: Metric) -> bool:
    """Parallel coordinates: an axis for each parameter, the metric's last with its best on top.

    Returns:
        Whether there was anything to draw: one parameter alone is `draw_parameters`'s.
    """
    keys, shown = parameters_of(rows), ranked_of(rows)
    if len(keys) < 2:
        return False
    figure = new_figure(max(6.5, 1.9 * (len(keys) + 1)), 4.8)
    axes = figure.subplots()
    scales = [Scale.of([r.values[key] for r in shown if key in r.values]) for key in keys]
    reached = [row.results[metric.name] for row in shown]
    low, high = min(reached), max(reached)
    for row, style in styled(shown):
        heights = [
            scale.share(row.values[key]) if key in row.values else math.nan
            for key, scale in zip(keys, scales, strict=True)
        ]
        last = (row.results[metric.name] - low) / (high - low) if high > low else 0.5
        axes.plot([*heights, last if metric.maximize else 1 - last], **style)
    for place, scale in enumerate(scales):
        texts = _thinned(scale)
        _write_axis(axes, place, [(scale.share(text), text) for text in texts])
    top, bottom = (high, low) if metric.maximize else (low, high)
    fifths = [i / 4 for i in range(5)] if high > low else [0.5]
    values = [bottom + (top - bottom) * share for share in fifths]
    _write_axis(axes, len(keys), [(s, f"{v:.4g}") for s, v in zip(fifths, values, strict=True)])
    axes.set_xticks(range(len(keys) + 1), [*map(short, keys), f"{metric.name}\n(best on top)"])
    axes.set_xlim(-0.25, len(keys) + 0.4)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    explain(figure, axes, shown)
    save(figure, path)
    return True


def _write_axis(axes: "Axes", place: float, ticks: Sequence[tuple[float, str]]) -> None:
    axes.axvline(place, color="0.2", lw=1, zorder=4)
    box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75}
    for height, text in ticks:
        axes.plot([place], [height], "_", color="0.2", ms=8, zorder=5)
        axes.annotate(
            short(text),
            (place, height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox=box,
            zorder=6,
        )


def _thinned(scale: Scale) -> list[str]:
    """As many of the values as can be written above each other."""
    kept: list[str] = []
    for text in scale.texts:
        if all(abs(scale.share(text) - scale.share(other)) > 0.07 for other in kept):
            kept.append(text)
    return kept
