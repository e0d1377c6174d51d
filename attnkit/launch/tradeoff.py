"""The picture of a sweep: what each trial reached against what it costs."""

from collections.abc import Sequence
from pathlib import Path

from attnkit.launch.ranking import label
from attnkit.launch.trials import Trial

FILE = "cost.png"
COST = "multiply_adds"


def draw(path: Path, trials: Sequence[Trial], metric: str) -> bool:
    """Draw `metric` against multiply-adds and the time of a step; False: there is nothing to.

    Points are means over the seeds of a trial, bars their standard deviation.
    """
    shown = [t for t in trials if not t.error and metric in t.results and COST in t.results]
    if len({t.results[COST] for t in shown}) < 2:
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    costs = {COST: "multiply-adds of a sample", "step_seconds": "seconds of a training step"}
    costs = {c: text for c, text in costs.items() if all(c in t.results for t in shown)}
    figure = Figure(figsize=(6.5 * len(costs), 4.5), layout="constrained")
    panels = figure.subplots(1, len(costs), squeeze=False)[0]
    for axes, (cost, text) in zip(panels, costs.items(), strict=True):
        for number, trial in enumerate(shown):
            point = (trial.results[cost], trial.results[metric])
            spread = trial.results.get(f"{metric}_std", 0.0)
            axes.errorbar(*point, yerr=spread, fmt="o", capsize=3, color=f"C{number % 10}")
            axes.annotate(label(trial), point, xytext=(5, 4), textcoords="offset points")
        values = [trial.results[cost] for trial in shown]
        axes.set(xlabel=text, ylabel=metric)
        if max(values) > 5 * min(values):
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_formatter(EngFormatter())
        axes.margins(x=0.15)  # room for the names
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
