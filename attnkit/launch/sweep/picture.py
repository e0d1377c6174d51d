"""Draws parameters.png, the picture of a sweep: the metric against each swept parameter."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from attnkit.launch.sweep.ranking import SEED, Metric, Row
from attnkit.launch.sweep.record import shortened
from attnkit.lightning.console import in_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "parameters.png"
_MEANS = 8  # up to so many numbers have a mean each; otherwise each mean is over so many trials
_LONGEST = 24  # characters of a value written below a plot
_CHARACTER = 0.021  # width of a character as a share of the panel's width


def draw(rows: Sequence[Row], metric: Metric) -> "Figure | None":
    """Draw the metric against each swept parameter; return None if there is nothing to compare.

    Points are trials, the line is their mean, and a bar is the standard deviation over the seeds
    of a row. Numbers have a logarithmic axis if they span a decade (whole numbers: two). Other
    values are drawn side by side.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.rank is not None]
    trials = [t for row in shown for t in row.trials if metric.name in t.results]
    swept = dict.fromkeys(key for trial in trials for key in trial.values)
    keys = [k for k in swept if k != SEED and len({t.values.get(k) for t in trials} - {None}) > 1]
    if not keys:
        return None
    columns = min(len(keys), 3)
    height = -(-len(keys) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * height + 0.3), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False, sharey=True).ravel()
    for panel, key in zip(panels, keys, strict=False):
        texts = dict.fromkeys(t.values[key] for t in trials if key in t.values)
        numbers = _numbers(texts)
        places = numbers or {text: float(i) for i, text in enumerate(texts)}
        points = sorted(
            (places[t.values[key]], t.results[metric.name]) for t in trials if key in t.values
        )
        panel.plot(*zip(*points, strict=True), "o", color="C0", alpha=0.45, ms=5, mew=0)
        style = {"ls": "-" if numbers else "none", "marker": "_", "ms": 12, "mew": 2}
        means = zip(*_means(points, neighbours=bool(numbers)), strict=True)
        panel.plot(*means, **style, color="C1", zorder=1.5, label="mean")
        _draw_spreads(panel, places, [r for r in shown if key in r.trials[0].values], key, metric)
        if _spans(numbers.values(), 100 if all(map(float.is_integer, numbers.values())) else 10):
            panel.set_xscale("log")
        _name_places(panel, places, numbers=bool(numbers))
        panel.set(xlabel=_short(key))
        panel.margins(x=0.1)
        panel.grid(visible=True, alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(keys) :]:
        panel.remove()
    for panel in panels[: len(keys) : columns]:
        panel.set_ylabel(metric.name)
    if _spans([t.results[metric.name] for t in trials], 100):
        panels[0].set_yscale("log")
    named = panels[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    return figure


def _numbers(texts: Iterable[str]) -> dict[str, float]:
    """Return the values as sorted numbers; empty if one of them is not a finite number."""
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        return {}
    finite = all(map(math.isfinite, numbers.values()))
    return dict(sorted(numbers.items(), key=lambda item: item[1])) if finite else {}


def _means(points: Sequence[tuple[float, float]], *, neighbours: bool) -> list[Any]:
    """Return the mean at each place; for many numbers, means over groups of neighbours."""
    import numpy as np

    values = np.array(points)
    places = np.unique(values[:, 0])
    if not neighbours or len(places) <= _MEANS:
        return [(place, values[values[:, 0] == place, 1].mean()) for place in places]
    parts = np.array_split(values, max(3, len(values) // _MEANS))
    return [(np.median(part[:, 0]), part[:, 1].mean()) for part in parts]


def _draw_spreads(
    panel: Any, places: Mapping[str, float], rows: Sequence[Row], key: str, metric: Metric
) -> None:
    spread = f"{metric.name}_std"
    several = [r for r in rows if r.results.get("num_seeds", 1) > 1 and spread in r.results]
    if several:
        x = [places[row.trials[0].values[key]] for row in several]
        y = [row.results[metric.name] for row in several]
        deviations = [row.results[spread] for row in several]
        panel.errorbar(
            x, y, deviations, fmt="none", color="C0", alpha=0.6, lw=1.2, label="± over seeds"
        )


def _name_places(axes: Any, places: Mapping[str, float], *, numbers: bool) -> None:
    """Set ticks at the values if their names have room, or else where matplotlib places them."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    shown = shortened(places)
    names = {place: _short(shown[text]) for text, place in places.items()}
    logarithmic = axes.get_xscale() == "log"
    ordered = sorted(math.log10(place) if logarithmic else place for place in names)
    wide = (ordered[-1] - ordered[0]) or 1.0
    gap = min((b - a for a, b in pairwise(ordered)), default=wide) / wide
    room = gap / _CHARACTER >= max(map(len, names.values())) + 1
    if room or not numbers:
        turned = {} if room else {"rotation": 40, "ha": "right"}
        axes.set_xticks([*names], [*names.values()], **turned)
        axes.set_xticks([], minor=True)
    elif logarithmic:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if wide < 3 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        whole = all(map(float.is_integer, names))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))


def _short(text: str) -> str:
    """Return a text shortened for the plot, in which matplotlib finds no formula."""
    return in_picture(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def _spans(values: Iterable[float], times: float) -> bool:
    """Return whether the smallest value is positive and the largest is `times` as large."""
    values = list(values)
    return bool(values) and min(values) > 0 and max(values) >= times * min(values)
