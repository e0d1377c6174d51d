"""The pictures of a sweep: the metric against each parameter, all at once, the curves, the cost."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from attnkit.launch.sweep.report.plotting import (
    Scale,
    explain,
    new_figure,
    parameters_of,
    ranked_of,
    short,
    spans,
    styled,
)
from attnkit.launch.sweep.report.ranking import COSTS, Metric, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCURACY = "test/accuracy"
_GREY = "0.6"
_MEANS = 8  # numbers that have a mean each; of more, trials in a mean
Draw = Callable[[Sequence[Row], Metric], "Figure | None"]  # None: there is nothing to draw


def draw_parameters(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """The metric against each swept parameter: points are trials, the line is their mean."""
    trials = [t for row in ranked_of(rows) for t in row.trials if metric.name in t.results]
    keys = parameters_of(rows)
    if not keys:
        return None
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
    return figure


def draw_curves(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """The metric on validation over the epochs, a line for each run; not counted trials in grey."""
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
        return None
    if reached:  # what failed, perhaps of values beyond all others, does not set the scale
        axes.set(xlim=limits[0], ylim=limits[1])
    if spans(reached, 100):
        axes.set_yscale("log")
        axes.set_ylim(min(reached) / 1.2, max(reached) * 1.2)
    axes.set(xlabel="epoch", ylabel=metric.monitor)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    explain(figure, axes, ranked_of(rows))
    return figure


def draw_parallel(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """Parallel coordinates: an axis for each parameter, the metric's last with its best on top.

    One parameter alone is `draw_parameters`'s.
    """
    keys, shown = parameters_of(rows), ranked_of(rows)
    if len(keys) < 2:
        return None
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
    return figure


def draw_cost(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """What was reached against multiply-adds and the time of a step: a point for each row, with
    the standard deviation over its seeds. Reached is the accuracy of the test, if there is one."""
    from matplotlib.ticker import EngFormatter

    name = ACCURACY if any(ACCURACY in row.results for row in rows) else metric.name
    shown = [row for row in rows if name in row.results and COSTS[1] in row.results]
    if len({row.results[COSTS[1]] for row in shown}) < 2:
        return None
    axis = {COSTS[1]: "multiply-adds of a sample", COSTS[2]: "seconds of a training step"}
    costs = [cost for cost in axis if all(cost in row.results for row in shown)]
    figure = new_figure(6.5 * len(costs), 4.5)
    panels = figure.subplots(1, len(costs), squeeze=False)[0]
    for axes, cost in zip(panels, costs, strict=True):
        for number, row in enumerate(shown):
            point = (row.results[cost], row.results[name])
            spread = row.results.get(f"{name}_std", 0.0)
            axes.errorbar(*point, yerr=spread, fmt="o", capsize=3, color=f"C{number % 10}")
            if len(shown) <= 12 or number < 3:  # of many, the best alone are named
                label = short(row.label, 40)
                axes.annotate(label, point, xytext=(5, 4), textcoords="offset points")
        axes.set(xlabel=axis[cost], ylabel=name)
        if spans([row.results[cost] for row in shown], 5):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_formatter(EngFormatter())
        axes.margins(x=0.15)  # room for the names
        axes.grid(visible=True, alpha=0.3)
    return figure


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
    "cost.png": draw_cost,
    "parameters.png": draw_parameters,
    "parallel.png": draw_parallel,
    "curves.png": draw_curves,
}
