"""The pictures of a sweep: the metric against each parameter, all of them at once, the curves."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from attnkit.launch.sweep.report.parallel import PARALLEL, draw_parallel
from attnkit.launch.sweep.report.plotting import (
    Scale,
    explain,
    new_figure,
    parameters_of,
    ranked_of,
    save,
    short,
    spans,
    styled,
)
from attnkit.launch.sweep.report.ranking import Metric, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARAMETERS = "parameters.png"
CURVES = "curves.png"
_GREY = "0.6"
_MEANS = 8  # numbers that have a mean each; of more, trials in a mean
Draw = Callable[[Path, Sequence[Row], Metric], bool]


def draw_parameters(path: Path, rows: Sequence[Row], metric: Metric) -> bool:
    """The metric against each swept parameter: points are trials, the line is their mean.

    Returns:
        Whether there was anything to draw.
    """
    trials = [t for row in ranked_of(rows) for t in row.trials if metric.name in t.results]
    keys = parameters_of(rows)
    if not keys:
        return False
    columns = min(len(keys), 3)
    height = -(-len(keys) // columns)
    figure = new_figure(4.6 * columns, 3.6 * height)
    panels = figure.subplots(height, columns, squeeze=False, sharey=True).ravel()
    for panel, key in zip(panels, keys, strict=False):
        scale = Scale.of([t.values[key] for t in trials if key in t.values])
        found = {
            text: [t.results[metric.name] for t in trials if t.values.get(key) == text]
            for text in scale.texts
        }
        for text, values in found.items():
            place = scale.places[text]
            panel.plot([place] * len(values), values, "o", color="C0", alpha=0.45, ms=5, mew=0)
        line, label = _means(scale, found)
        style = "-" if scale.numeric else "none"
        panel.plot(
            *zip(*line, strict=True), ls=style, color="C1", marker="_", ms=12, mew=2, label=label
        )
        panel.legend(frameon=False, fontsize=8)
        _name_ticks(panel, scale)
        panel.set(xlabel=short(key))
        panel.margins(x=0.1)
        panel.grid(visible=True, alpha=0.3)
    for panel in panels[len(keys) :]:
        panel.remove()
    for panel in panels[: len(keys) : columns]:
        panel.set_ylabel(metric.name)
    if spans([t.results[metric.name] for t in trials], 100):
        panels[0].set_yscale("log")
    save(figure, path)
    return True


def draw_curves(path: Path, rows: Sequence[Row], metric: Metric) -> bool:
    """The metric on validation over the epochs, a line for each run; not counted trials in grey.

    Returns:
        Whether there was anything to draw.
    """
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    reached: list[float] = []
    for row, style in styled(ranked_of(rows)):
        for points in _histories(row, metric.monitor):
            axes.plot(
                *zip(*points, strict=True), **style, marker="o", ms=3 if len(points) < 20 else 0
            )
            reached += [value for _, value in points]
            style = {**style, "label": None}  # a row of several runs is named once
    limits = axes.get_xlim(), axes.get_ylim()
    others = [p for row in rows if row.rank is None for p in _histories(row, metric.monitor)]
    for number, points in enumerate(others):
        label = None if number else "not counted"
        axes.plot(*zip(*points, strict=True), color=_GREY, lw=1, ls="--", zorder=1, label=label)
    if not reached and not others:
        return False
    if reached:  # what failed, perhaps of values beyond all others, does not set the scale
        axes.set(xlim=limits[0], ylim=limits[1])
    if spans(reached, 100):
        axes.set_yscale("log")
        axes.set_ylim(min(reached) / 1.2, max(reached) * 1.2)
    axes.set(xlabel="epoch", ylabel=metric.monitor)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    explain(figure, axes, ranked_of(rows))
    save(figure, path)
    return True


def _means(
    scale: Scale, found: Mapping[str, Sequence[float]]
) -> tuple[list[tuple[float, float]], str]:
    """The mean at each value; of many numbers, those of neighbours: equally many in each bin."""
    means: dict[float, list[float]] = {}
    for text, values in found.items():  # 0.1 and 1e-1 are one number
        means.setdefault(scale.places[text], []).extend(values)
    if not scale.numeric or len(means) <= _MEANS:
        return [(place, math.fsum(v) / len(v)) for place, v in means.items()], "mean"
    points = [(place, value) for place, values in sorted(means.items()) for value in values]
    bins = max(3, len(points) // _MEANS)
    edges = [round(i * len(points) / bins) for i in range(bins + 1)]
    line = []
    for start, end in pairwise(edges):
        places, values = zip(*points[start:end], strict=True)
        line.append((median(places), math.fsum(values) / len(values)))
    return line, "mean of neighbours"


def _name_ticks(panel: "Axes", scale: Scale) -> None:
    """The values themselves where they are few; a logarithmic axis where they span decades."""
    from matplotlib.ticker import NullFormatter, NullLocator

    if scale.log:
        panel.set_xscale("log")
    if scale.numeric and len(scale.texts) > 7:
        return
    panel.set_xticks([scale.places[t] for t in scale.texts], [short(t) for t in scale.texts])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
    if sum(map(len, map(short, scale.texts))) > 40:
        panel.tick_params(axis="x", rotation=40)
        for label in panel.get_xticklabels():
            label.set_horizontalalignment("right")


def _histories(row: Row, name: str) -> Iterator[list[tuple[float, float]]]:
    """(epoch, value) of each run, from metrics.csv."""
    for trial in row.trials:
        for path in sorted(trial.folder.glob("metrics.csv")) or sorted(
            trial.folder.glob("*/metrics.csv")
        ):
            if points := history(path, name):
                yield points


def history(path: Path, name: str) -> list[tuple[float, float]]:
    """What metrics.csv has of a metric: the epochs that were over, and the values.

    Several values in an epoch lie evenly in it. A row that a crash left half written is left out.
    """
    epochs: dict[int, list[float]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for record in csv.DictReader(file):
            try:
                epoch, value = int(record["epoch"]), float(record[name])
            except (KeyError, TypeError, ValueError):
                continue
            if math.isfinite(value):
                epochs.setdefault(epoch, []).append(value)
    return [
        (epoch + (place + 1) / len(values), value)
        for epoch, values in sorted(epochs.items())
        for place, value in enumerate(values)
    ]


PICTURES: dict[str, Draw] = {
    PARAMETERS: draw_parameters,
    PARALLEL: draw_parallel,
    CURVES: draw_curves,
}
