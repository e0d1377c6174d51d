"""Ranks the trials of a sweep, best first; trials that differ only by seed form one row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnkit.launch.command import key_of
from attnkit.launch.sweep.record import Trial
from attnkit.lightning.best import mode_of
from attnkit.lightning.console import in_line, seconds, three_digits, with_prefix
from attnkit.lightning.files import write_csv

SEED = "seed"
COSTS = ("parameters", "multiply_adds", "step_seconds")
_SHOWN_SEEDS = 6


@dataclass(frozen=True)
class Metric:
    """The metric that ranks trials: the best value of the checkpoint callback's monitor.

    It is a validation metric, since a test metric used for choosing would be biased.
    """

    monitor: str = "val/loss"
    maximize: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Metric":
        """Return the metric of a trial with this configuration."""
        checkpoint = (config.get("callbacks") or {}).get("checkpoint") or {}
        monitor = str(checkpoint.get("monitor") or cls.monitor)
        return cls(monitor, (checkpoint.get("mode") or mode_of(monitor)) == "max")

    @property
    def name(self) -> str:
        """The metric's name in results.json."""
        return f"{self.monitor}_best"

    def order(self, results: Mapping[str, float]) -> tuple[bool, float]:
        """Return a key for sorting, with the best first and results without the metric last."""
        missing = self.name not in results
        return missing, 0.0 if missing else (-1 if self.maximize else 1) * results[self.name]


@dataclass(frozen=True)
class Row:
    """Finished trials that differ only by seed, or one trial that is not finished."""

    trials: tuple[Trial, ...]
    results: dict[str, float] = field(default_factory=dict)
    """As in results.json, over all seeds; `num_seeds` is the number of seeds with the metric."""
    rank: int | None = None
    """The rank, counted from 1; None without the metric."""

    @property
    def state(self) -> str:
        """The state, which all trials of the row share."""
        return self.trials[0].state

    @property
    def error(self) -> str:
        """The error of a failed trial in one line."""
        return in_line(" ".join(self.trials[0].error.split()))

    @property
    def numbers(self) -> str:
        """The numbers of the row's trials, as text."""
        return " ".join(str(trial.number) for trial in self.trials)

    @property
    def seeds(self) -> int:
        """The number of seeds that have the metric."""
        return int(self.results.get("num_seeds", 1))

    @property
    def values(self) -> dict[str, str]:
        """The values of the swept keys; for the seed, the values of all trials."""
        values = dict(self.trials[0].values)
        if SEED in values:
            seeds = [trial.values[SEED] for trial in self.trials]
            if len(seeds) > _SHOWN_SEEDS:
                seeds = [seeds[0], "…", seeds[-1]]
            values[SEED] = " ".join(seeds)
        return values


def ranked(trials: Sequence[Trial], metric: Metric, *, by_seed: bool = False) -> list[Row]:
    """Return the rows, best first; trials that are not finished come last, sorted by state.

    Args:
        trials: the trials of a sweep.
        metric: the metric that ranks them.
        by_seed: whether each trial has a row of its own, even if only the seed differs.
    """
    groups: dict[tuple[Any, ...], list[tuple[set[str], list[Trial]]]] = {}
    for trial in trials:
        if trial.state == "done":
            alone = trial.number if by_seed else None
            same = tuple(o for o in trial.overrides if key_of(o) != SEED)
            seeds, similar = _seeds(trial), groups.setdefault((alone, same), [])
            # a trial that repeats a seed must not count as another seed
            group = next((group for group in similar if not group[0] & seeds), None)
            if group is None:
                similar.append((seeds, [trial]))
            else:
                group[0].update(seeds)
                group[1].append(trial)
    rows = [Row(tuple(members), pooled([t.results for t in members], metric.name))
            for similar in groups.values() for _, members in similar]  # fmt: skip
    rows.sort(key=lambda row: (*metric.order(row.results), row.trials[0].number))
    rows = [
        Row(row.trials, row.results, rank if metric.name in row.results else None)
        for rank, row in enumerate(rows, 1)
    ]
    states = ["failed", *sorted({t.state for t in trials} - {"done", "failed"})]
    rest = [Row((t,)) for state in states for t in trials if t.state == state]
    return rows + rest


def _seeds(trial: Trial) -> set[str]:
    """Return the seeds that a trial has run; with `seeds=N` each has a folder."""
    parts = {path.name.removeprefix("seed_") for path in trial.folder.glob("seed_*")}
    return parts or {trial.values.get(SEED, "")}


def pooled(parts: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return results of several jobs as one: means and standard deviations over all seeds.

    A job of n seeds has a mean m and a standard deviation s. With the mean M of all N seeds, the
    pooled variance is the sum of (n − 1) s² + n (m − M)² over jobs, divided by N − 1. `num_seeds`
    counts the seeds that have the `metric`.
    """
    parts = [{k: v for k, v in part.items() if isinstance(v, int | float)} for part in parts]
    if len(parts) == 1:
        return dict(parts[0])
    results: dict[str, float] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    for name in names:
        having = [part for part in parts if name in part]
        is_spread = name.endswith("_std") and name.removesuffix("_std") in names
        if name == "num_seeds" or is_spread:
            continue
        counts = [int(part.get("num_seeds", 1)) for part in having]
        number = sum(counts)
        mean = math.fsum(n * part[name] for n, part in zip(counts, having, strict=True)) / number
        results[name] = mean
        spread = f"{name}_std"
        if number > 1 and all(n == 1 or spread in p for n, p in zip(counts, having, strict=True)):
            squares = [
                (n - 1) * part.get(spread, 0.0) ** 2 + n * (part[name] - mean) ** 2
                for n, part in zip(counts, having, strict=True)
            ]
            results[spread] = math.sqrt(math.fsum(squares) / (number - 1))
        if name == metric:
            results["num_seeds"] = number
    return results


def figures_of(rows: Sequence[Row], metric: Metric) -> list[str]:
    """Return the names of results to show: the metric, test metrics, costs."""
    present = {name for row in rows for name in row.results}
    tests = sorted(n for n in present if n.startswith("test/") and not n.endswith("_std"))
    tests.sort(key=lambda name: name.endswith("/loss"))
    return [n for n in (metric.name, *tests, *COSTS, "seconds") if n in present]


def figure(results: Mapping[str, float], name: str) -> str:
    """Return a number of results.json as text, with its deviation if there are several seeds."""
    if name not in results:
        return ""
    value = results[name]
    if name in COSTS[:2]:
        return with_prefix(value)
    if name.endswith("seconds"):
        return seconds(value)
    spread = results.get(f"{name}_std") if results.get("num_seeds", 1) > 1 else None
    return three_digits(value, spread)


def save_csv(path: Path, rows: Sequence[Row], figures: Sequence[str]) -> None:
    """Write rank, trial, values, n, figures with `_std` where n > 1, state, folder and error.

    A row of several trials has no folder; `trials.csv` lists their folders.
    """
    keys = keys_of(rows)
    spreads = {
        f"{name}_std"
        for name in figures
        if name not in (*COSTS, "seconds")
        and any(row.seeds > 1 and f"{name}_std" in row.results for row in rows)
    }
    names = [n for one in figures for n in (one, f"{one}_std") if n == one or n in spreads]
    lines: list[list[Any]] = []
    for row in rows:
        rank = "" if row.rank is None else row.rank
        values = [row.values.get(key, "") for key in keys]
        # a single value has no deviation
        shown = [n if n in figures or row.seeds > 1 else "" for n in names]
        numbers = [row.results.get(name, "") for name in shown]
        folder = str(row.trials[0].folder) if len(row.trials) == 1 else ""
        count = row.seeds if "num_seeds" in row.results else ""
        lines.append([rank, row.numbers, *values, count, *numbers, row.state, folder, row.error])
    write_csv(path, ["rank", "trial", *keys, "n", *names, "state", "folder", "error"], lines)


def keys_of(rows: Sequence[Row]) -> list[str]:
    """Return the swept keys."""
    return list(dict.fromkeys(key for row in rows for key in row.trials[0].values))
