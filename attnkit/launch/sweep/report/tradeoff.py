"""The picture of what the trials of a sweep reached against what they cost."""

from collections.abc import Sequence
from pathlib import Path

from attnkit.launch.sweep.report.plotting import short
from attnkit.launch.sweep.report.ranking import Row

FILE = "cost.png"
COST = "multiply_adds"
_NAMED, _BEST = 12, 3  # rows that are all named; of more, the best of them


def draw(path: Path, rows: Sequence[Row], metric: str) -> bool:
    """Draw `metric` against multiply-adds and the time of a step; False: there is nothing to.

    Points are means over the seeds of a row, bars their standard deviation.
    """
    shown = [row for row in rows if metric in row.results and COST in row.results]
    if len({row.results[COST] for row in shown}) < 2:
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    costs = {COST: "multiply-adds of a sample", "step_seconds": "seconds of a training step"}
    costs = {c: text for c, text in costs.items() if all(c in row.results for row in shown)}
    figure = Figure(figsize=(6.5 * len(costs), 4.5), layout="constrained")
    panels = figure.subplots(1, len(costs), squeeze=False)[0]
    for axes, (cost, text) in zip(panels, costs.items(), strict=True):
        for number, row in enumerate(shown):
            point = (row.results[cost], row.results[metric])
            spread = row.results.get(f"{metric}_std", 0.0)
            axes.errorbar(*point, yerr=spread, fmt="o", capsize=3, color=f"C{number % 10}")
            if len(shown) <= _NAMED or number < _BEST:
                axes.annotate(
                    short(row.label, 40), point, xytext=(5, 4), textcoords="offset points"
                )
        values = [row.results[cost] for row in shown]
        axes.set(xlabel=text, ylabel=metric)
        if max(values) > 5 * min(values):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_formatter(EngFormatter())
        axes.margins(x=0.15)  # room for the names
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
