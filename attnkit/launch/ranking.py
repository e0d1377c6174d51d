"""The trials of a sweep in one table, best first."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnkit.launch.trials import Trial

FILE = "table.csv"
MARKDOWN = "table.md"
COSTS = ("parameters", "multiply_adds", "step_seconds")


def ranked(trials: Sequence[Trial], config: Mapping[str, Any]) -> tuple[list[Trial], list[str]]:
    """The trials, best first and failed ones last, and the figures to show.

    Ranked by the best value of the metric that the checkpoint callback follows, which is one of
    validation: choosing by the test metric would spoil it.
    """
    checkpoint = (config.get("callbacks") or {}).get("checkpoint") or {}
    metric = f"{checkpoint.get('monitor', 'val/loss')}_best"
    sign = -1 if checkpoint.get("mode") == "max" else 1

    def order(trial: Trial) -> tuple[bool, float, int]:
        missing = metric not in trial.results
        return missing, 0.0 if missing else sign * trial.results[metric], trial.number

    present = {name for trial in trials for name in trial.results}
    tests = sorted(n for n in present if n.startswith("test/") and not n.endswith("_std"))
    names = (metric, *tests, *COSTS, "seconds")
    return sorted(trials, key=order), [n for n in names if n in present]


def label(trial: Trial) -> str:
    """What sets a trial apart: its values."""
    return " ".join(trial.values.values()) or str(trial.number)


def save(path: Path, trials: Sequence[Trial], figures: Sequence[str]) -> None:
    """table.csv: rank, trial, its values, its figures, its folder, its error."""
    keys = _keys(trials)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "trial", *keys, *figures, "folder", "error"])
        for rank, trial in enumerate(trials, 1):
            values = [trial.values.get(key, "") for key in keys]
            numbers = [trial.results.get(name, "") for name in figures]
            row = ["" if trial.error else rank, trial.number, *values, *numbers]
            writer.writerow([*row, str(trial.folder), " ".join(trial.error.split())])


def save_markdown(path: Path, trials: Sequence[Trial], figures: Sequence[str], said: str) -> None:
    """table.md: the same for people, and in words what the trials share."""
    keys = _keys(trials)
    rows = [["rank", *keys, *figures], ["---:", *["---"] * len(keys), *["---:"] * len(figures)]]
    for rank, trial in enumerate(trials, 1):
        values = [trial.values.get(key, "") for key in keys]
        numbers = [trial.state if trial.error else _number(trial.results, n) for n in figures]
        rows.append(["" if trial.error else str(rank), *values, *numbers])
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    path.write_text("\n".join([*lines, "", said, ""]), encoding="utf-8")


def in_words(trials: Sequence[Trial], shared: Sequence[str]) -> str:
    """What differs between the trials and what they share, so that a table says what was tuned."""
    seeds = {trial.results.get("num_seeds", 1) for trial in trials if not trial.error}
    number = f"{int(min(seeds, default=1))}" + (f" to {int(max(seeds))}" if len(seeds) > 1 else "")
    return (
        f"What differs: {', '.join(_keys(trials)) or 'nothing'}. Everything else is the same in "
        f"all trials ({' '.join(shared) or 'the defaults'}; seeds in each: {number}) and was not "
        "tuned for any of them. Ranked by the best validation value; ± is the standard deviation "
        "over the seeds."
    )


def show(trials: Sequence[Trial], figures: Sequence[str]) -> None:
    """The table on screen."""
    from rich.markup import escape
    from rich.table import Table

    from attnkit.launch.report import print_table

    keys = _keys(trials)
    table = Table(title="trials, best first", title_justify="left")
    for name in ("rank", "trial", *keys, *figures):
        table.add_column(name, justify="left" if name in keys else "right")
    for rank, trial in enumerate(trials, 1):
        values = [escape(trial.values.get(key, "")) for key in keys]
        if trial.error:
            table.add_row(
                "–",
                str(trial.number),
                *values,
                trial.state,
                style="red" if trial.state == "failed" else "dim",
            )
            continue
        numbers = [_number(trial.results, name) for name in figures]
        table.add_row(str(rank), str(trial.number), *values, *numbers)
    print_table(table)


def _number(results: Mapping[str, float], name: str) -> str:
    if name not in results:
        return ""
    spread = results.get(f"{name}_std", 0.0)
    if name in ("parameters", "multiply_adds"):
        return f"{results[name]:,.0f}"
    text = f"{results[name]:.1f}" if name == "seconds" else f"{results[name]:.4f}"
    return f"{text} ± {spread:.4f}" if spread else text


def _keys(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(key for trial in trials for key in trial.values))
