"""The pictures of a sweep: the metric against each parameter, the curves, the cost."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from attnkit.launch.sweep.report.axes import (
    MARKERS,
    NAMED,
    colours_of,
    in_legend,
    name_places,
    name_rows,
    new_figure,
    short,
    spans,
)
from attnkit.launch.sweep.report.ranking import COSTS, SEED, Metric, Row
from attnkit.launch.sweep.report.table import labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "test/accuracy"
_MEANS = 8  # numbers that have a mean each; of more, trials in a mean
Draw = Callable[[Sequence[Row], Metric], "Figure | None"]  # None: there is nothing to draw


def draw_parameters(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """The metric against each swept parameter: points are trials, the line is their mean, a bar is
    the standard deviation over the seeds of a row.

    Numbers lie at themselves, on a logarithmic axis if they span a decade (whole numbers: two);
    other values lie side by side.
    """
    shown = _ranked(rows)
    trials = [t for row in shown for t in row.trials if metric.name in t.results]
    swept = dict.fromkeys(key for trial in trials for key in trial.values)
    keys = [k for k in swept if k != SEED and len({t.values.get(k) for t in trials} - {None}) > 1]
    if not keys:
        return None
    columns = min(len(keys), 3)
    height = -(-len(keys) // columns)
    figure = new_figure(4.6 * columns, 3.6 * height + 0.3)
    panels = figure.subplots(height, columns, squeeze=False, sharey=True).ravel()
    for panel, key in zip(panels, keys, strict=False):
        texts = dict.fromkeys(t.values[key] for t in trials if key in t.values)
        numbers = _numbers(texts)
        places = numbers or {text: float(i) for i, text in enumerate(texts)}
        found: dict[float, list[float]] = {place: [] for place in places.values()}
        for trial in trials:
            if key in trial.values:  # 0.1 and 1e-1 are one number
                found[places[trial.values[key]]].append(trial.results[metric.name])
        for place, values in found.items():
            panel.plot([place] * len(values), values, "o", color="C0", alpha=0.45, ms=5, mew=0)
        line, label = _means(found, neighbours=bool(numbers))
        several = any(len(values) > 1 for values in found.values())
        style: dict[str, Any] = {"marker": "_", "ms": 12, "mew": 2, "label": label}
        panel.plot(
            *zip(*line, strict=True),
            ls="-" if numbers else "none",
            color="C1",
            zorder=1.5,
            **(style if several else {}),
        )
        for place in found:
            those = [r for r in shown if places.get(r.trials[0].values.get(key, "")) == place]
            _draw_spreads(panel, place, those, metric.name)
        if spans(numbers.values(), 100 if all(map(float.is_integer, numbers.values())) else 10):
            panel.set_xscale("log")
        name_places(panel, places, numbers=bool(numbers))
        panel.set(xlabel=short(key))
        panel.margins(x=0.1)
        panel.grid(visible=True, alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(keys) :]:
        panel.remove()
    for panel in panels[: len(keys) : columns]:
        panel.set_ylabel(metric.name)
    if spans([t.results[metric.name] for t in trials], 100):
        panels[0].set_yscale("log")
    found_labels = [panel.get_legend_handles_labels() for panel in panels[: len(keys)]]
    legend = {n: h for hs, ns in found_labels for h, n in zip(hs, ns, strict=True)}
    if legend:
        figure.legend(
            legend.values(), legend, loc="outside upper right", ncols=3, frameon=False, fontsize=8
        )
    return figure


def draw_curves(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """The metric on validation over the epochs, a line for each run: dark for the best, light for
    the last, grey for what is not counted. A legend names few rows; of many, a bar the ranks."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    shown = _ranked(rows)
    few = len(shown) <= NAMED
    colours, names = colours_of(shown), labels(shown)
    reached: list[float] = []
    for place, row in enumerate(shown):
        style: dict[str, Any] = {
            "color": colours.to_rgba(place + 1),
            "lw": 1.3 if place else 2.6,
            "alpha": 1.0 if few or not place else 0.6,
            "zorder": 3 - place / len(shown),  # the best on top of all
            "label": in_legend(f"{row.rank}: {names[place]}") if few else None,
        }
        for points in _histories(row, metric.monitor):
            axes.plot(
                *zip(*points, strict=True), **style, marker="o", ms=3 if len(points) < 20 else 0
            )
            reached += [value for _, value in points]
            style["label"] = None  # a row of several runs is named once
    limits = axes.get_xlim(), axes.get_ylim()
    others = [p for row in rows if row.rank is None for p in _histories(row, metric.monitor)]
    for number, points in enumerate(others):
        label = None if number else "not counted"
        axes.plot(*zip(*points, strict=True), color="0.6", lw=1, ls="--", zorder=1, label=label)
    if not reached and not others:
        return None
    if reached:  # what failed, perhaps of values beyond all others, does not set the scale
        axes.set(xlim=limits[0], ylim=limits[1])
    if spans(reached, 100):
        axes.set_yscale("log")
        axes.set_ylim(min(reached) / 1.2, max(reached) * 1.2)
    axes.set(xlabel="epoch", ylabel=metric.monitor)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    name_rows(figure, axes, colours, few=few)
    return figure


def draw_cost(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """What was reached against multiply-adds and the time of a step: a point for each row, with
    the standard deviation over its seeds. Reached is the accuracy of the test, if there is one.
    Colours and names are those of the curves."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    name = ACCURACY if any(ACCURACY in row.results for row in rows) else metric.name
    shown = [row for row in _ranked(rows) if name in row.results and COSTS[1] in row.results]
    if len({row.results[COSTS[1]] for row in shown}) < 2:
        return None
    axis = {
        COSTS[1]: ("multiply-adds of a sample", 1.0),
        COSTS[2]: ("milliseconds of a training step", 1e3),
    }
    costs = [cost for cost in axis if all(cost in row.results for row in shown)]
    few = len(shown) <= NAMED
    figure = new_figure(4.6 * len(costs) + 2.4, 4.2)
    panels = figure.subplots(1, len(costs), squeeze=False, sharey=True)[0]
    colours, names = colours_of(shown), labels(shown)
    for axes, cost in zip(panels, costs, strict=True):
        label, scale = axis[cost]
        found = [scale * row.results[cost] for row in shown]
        for place, row in enumerate(shown):
            several = row.results.get("num_seeds", 1) > 1
            axes.errorbar(
                found[place],
                row.results[name],
                yerr=row.results.get(f"{name}_std") if several else None,
                fmt=MARKERS[place] if few else "o",
                ms=8 if few else 5,
                capsize=3,
                color=colours.to_rgba(place + 1),
                label=in_legend(f"{row.rank}: {names[place]}") if few else None,
            )
        axes.set(xlabel=label)
        if spans(found, 5):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.margins(x=0.12)
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(name)
    name_rows(figure, panels[-1], colours, few=few)
    return figure


PICTURES: dict[str, Draw] = {
    "cost.png": draw_cost,
    "parameters.png": draw_parameters,
    "curves.png": draw_curves,
}


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
    before = 0 if 0 in epochs else 1  # files of former versions count from 0
    return [
        (epoch - before + (place + 1) / len(values), value)
        for epoch, values in sorted(epochs.items())
        for place, value in enumerate(values)
    ]


def _histories(row: Row, name: str) -> Iterator[list[tuple[float, float]]]:
    """(epoch, value) of each run, from metrics.csv."""
    for trial in row.trials:
        own = sorted(trial.folder.glob("metrics.csv"))
        for path in own or sorted(trial.folder.glob("*/metrics.csv")):
            if points := history(path, name):
                yield points


def _numbers(texts: Iterable[str]) -> dict[str, float]:
    """The values as numbers, in order; empty where one of them is not a finite number."""
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        return {}
    finite = all(map(math.isfinite, numbers.values()))
    return dict(sorted(numbers.items(), key=lambda item: item[1])) if finite else {}


def _means(
    found: Mapping[float, Sequence[float]], *, neighbours: bool
) -> tuple[list[tuple[float, float]], str]:
    """The mean at each place; of many numbers, those of neighbours: equally many in each bin."""
    if not neighbours or len(found) <= _MEANS:
        return [(place, fmean(values)) for place, values in found.items()], "mean"
    points = [(place, value) for place, values in found.items() for value in values]
    bins = max(3, len(points) // _MEANS)
    edges = [round(i * len(points) / bins) for i in range(bins + 1)]
    parts = [zip(*points[start:end], strict=True) for start, end in pairwise(edges)]
    return [(median(places), fmean(values)) for places, values in parts], "mean of neighbours"


def _draw_spreads(panel: Any, place: float, rows: Sequence[Row], name: str) -> None:
    """The deviation over the seeds of each of these rows, side by side."""
    from matplotlib.transforms import ScaledTranslation

    spread = f"{name}_std"
    several = [r for r in rows if r.results.get("num_seeds", 1) > 1 and spread in r.results]
    for number, row in enumerate(several):
        points = min(6.0, 40 / len(several)) * (number - (len(several) - 1) / 2)
        moved = ScaledTranslation(points / 72, 0, panel.figure.dpi_scale_trans)
        mean, deviation = row.results[name], row.results[spread]
        ends = mean - deviation, mean + deviation
        style = {"color": "C0", "lw": 1.2, "alpha": 0.6, "label": "± over seeds"}
        panel.vlines(place, *ends, transform=panel.transData + moved, **style)
        panel.update_datalim([(place, end) for end in ends])


def _ranked(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.rank is not None]
