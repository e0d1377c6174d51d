"""The report of a sweep: a ranked table (CSV, Markdown, screen), a page and the best command.

`run=report sweep=DIR` and the end of every sweep write it, into the sweep's own folder. The folders
of trials are only read. It needs neither torch nor Hydra.
"""

import base64
import math
import os
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnkit
from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, key_of, setting
from attnkit.launch.decide import Request
from attnkit.launch.errors import CRASHED, summary
from attnkit.launch.sweep.ranking import (
    SEED,
    Metric,
    Row,
    figure,
    figures_of,
    keys_of,
    ranked,
    save_csv,
)
from attnkit.launch.sweep.record import Sweep, Trial, find_sweep, read_sweep, shortened, to_go_on
from attnkit.lightning.console import cell, in_line, in_picture, three_digits, visible
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "parameters.png"
_TEMPLATES = ("launch/sweep/templates", "interpret/report/templates")  # the second has page.css
_NO_SCREEN = 160  # columns in a file or a pipe
_LONG_WORD = 10  # longer words of a header are broken at underscores
_MEANS = 8  # up to so many values of a key have their means drawn
_LONGEST = 24  # characters of a value written below a plot
_COLOURS = {"done": None, "failed": "red"}


def report(request: Request, launcher: object = None) -> int:
    """Carry out `run=report sweep=DIR` and return the exit code."""
    for override in request.overrides:
        if key_of(override) not in ("run", "sweep"):
            raise UserError(f"{override}: not for run=report, which only reads sweep=PATH")
    finish(find_sweep(request.config.get("sweep"), "sweep"))
    return 0


def finish(folder: Path) -> int:
    """Report on a sweep on screen and in files; return its exit code, which is 1 if a trial has
    failed, was interrupted or is waiting."""
    sweep = read_sweep(folder)
    metric, rows, best = _ranking(sweep)
    figures = figures_of(rows, metric)
    columns, same = columns_of(rows, figures)
    others = (*sweep.keys, "run_dir")
    shared = [o for o in sweep.command if key_of(o) not in others and o not in sweep.hydra]
    summary_text = in_words(rows, same, shared)
    show(rows, columns)
    print(summary_text)
    table = as_markdown(columns)
    save_csv(folder / "table.csv", rows, figures)
    write_text(folder / "table.md", f"{table}\n\n{summary_text}\n")
    print(f"  table  {folder / 'table.csv'}\n         {folder / 'table.md'}")
    if any(len(row.trials) > 1 for row in rows):
        save_csv(folder / "trials.csv", ranked(sweep.trials, metric, by_seed=True), figures)
        print(f"         {folder / 'trials.csv'}")
    drawn = _draw(folder / PICTURE, rows, metric)
    page: dict[str, Any] = {"title": sweep.folder.name, "columns": columns, "said": summary_text}
    page |= {"table": table, "picture": base64.b64encode(drawn).decode(), "best": best}
    page["errors"] = [row for row in rows if row.state == "failed"]
    if best:
        page["value"] = f"{metric.name} {three_digits(best.results[metric.name])}"
        page["command"] = command_of(sweep, best)
    _write_pages(folder, page)
    if best:
        print(f"the best run, trial {best.number}:\n  {page['command']}")
    if failed := sweep.having("failed"):
        words = ("run=retry", setting("sweep", sweep.folder))
        again = command_line(*words, permission=sweep.permission)
        print(in_line(f"{len(failed)} failed; to run them again: {again}"))
    for state in ("running", "interrupted", "waiting"):
        if trials := sweep.having(state):
            print(in_line(f"{len(trials)} {state}; to go on: {to_go_on(sweep)}"))
    return CRASHED if sweep.having("failed", "interrupted", "waiting") else 0


def best_command(folder: Path) -> str:
    """Return the command of a sweep's best run, as in its report; "" if no trial is done."""
    sweep = read_sweep(folder)
    *_, best = _ranking(sweep)
    return command_of(sweep, best) if best else ""


def command_of(sweep: Sweep, trial: Trial) -> str:
    """Return the command that runs this trial by itself, quoted for a POSIX shell."""
    start = Path(sweep.working_dir)
    elsewhere = start.is_dir() and start != Path.cwd()
    place = f"cd {shlex.quote(sweep.working_dir)} && " if elsewhere else ""
    own = command_line(*trial.overrides, permission=sweep.permission)
    return in_line(f"{place}{own}")


def _ranking(sweep: Sweep) -> tuple[Metric, list[Row], Trial | None]:
    """Return the metric of a sweep, its ranked rows, and the best trial of the best row."""
    config: Mapping[str, Any] = {}
    for trial in (*sweep.having("done"), *sweep.trials):
        with suppress(UserError):  # not written yet, or broken
            config = folders.load_config(trial.folder)
            break
    metric = Metric.of(config)
    rows = ranked(sweep.trials, metric)
    if not rows or rows[0].rank is None:
        return metric, rows, None
    having = [trial for trial in rows[0].trials if metric.name in trial.results]
    best = min(having, key=lambda trial: (metric.order(trial.results), trial.number))
    return metric, rows, best


def _draw(path: Path, rows: Sequence[Row], metric: Metric) -> bytes:
    """Write the picture and return it; empty if there is none. An error becomes a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings on letters that a font lacks
            drawn = draw(rows, metric)
            if drawn is None:
                return b""
            with replacing(path) as file:
                drawn.savefig(file, format="png", dpi=120)
    except Exception as error:
        print(f"warning: {path.name} could not be drawn: {summary(error).splitlines()[0]}")
        return b""
    print(f"  plot   {path}")
    return path.read_bytes()


def _write_pages(folder: Path, page: Mapping[str, Any]) -> None:
    """Write report.html and report.md with the templates of these names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    package = Path(attnkit.__file__).parent
    environment = Environment(
        loader=FileSystemLoader([package / place for place in _TEMPLATES]),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("report.html", "report.md"):
        write_text(folder / name, f"{environment.get_template(name).render(page).rstrip()}\n")
        print(f"  report {folder / name}")


# --- the table on screen and in Markdown ----------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column: its name, a cell for each row, and whether a narrow screen may omit it."""

    name: str
    cells: list[str]
    left: bool = False
    optional: bool = False


def columns_of(rows: Sequence[Row], figures: Sequence[str]) -> tuple[list[Column], dict[str, str]]:
    """Return the columns that differ between rows, and name and cell of those that do not.

    Args:
        rows: the ranked rows.
        figures: names of results to show, the most important first.
    """
    texts = {k: shortened(r.values[k] for r in rows if k in r.values) for k in keys_of(rows)}
    values = [{k: in_line(texts[k][v]) for k, v in row.values.items()} for row in rows]
    done = [row.state == "done" for row in rows]
    first, *others = figures or ["state"]
    columns = [
        Column("rank", ["–" if row.rank is None else str(row.rank) for row in rows]),
        Column("trial", [row.numbers for row in rows], left=True),
        *(Column(key, [v.get(key, "") for v in values], left=True) for key in texts),
        Column("n", [f"{r.results.get('num_seeds', 0):g}" * (r.state == "done") for r in rows]),
        Column(first, [figure(r.results, first) if r.state == "done" else r.state for r in rows]),
        *(Column(n, [figure(row.results, n) for row in rows], optional=True) for n in others),
    ]
    same = {}
    for column in columns[2:]:
        cells = [c for c, d in zip(column.cells, done, strict=True) if d or column.left]
        if len(cells) > 1 and len(set(cells)) == 1 and column.name != first:
            same[column.name] = cells[0]
    return [column for column in columns if column.name not in same], same


def show(rows: Sequence[Row], columns: Sequence[Column], console: Any = None) -> None:
    """Print the table; a narrow screen omits optional columns, and a line names them."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    console = console or Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_SCREEN
    optional = [column for column in columns if column.optional]
    for broken, left in [(False, 0), *((True, n) for n in range(len(optional) + 1))]:
        hidden = optional[len(optional) - left :]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.title, table.title_justify = "trials, best first", "left"
        shown = [column for column in columns if column not in hidden]
        for column in shown:
            name = broken_name(column.name)
            table.add_column(
                escape(visible(name if broken else column.name)),
                justify="left" if column.left else "right",
                overflow="fold",
                min_width=max(map(len, name.split("\n"))),
            )
        for number, row in enumerate(rows):
            cells = [cell(column.cells[number]) for column in shown]
            table.add_row(*cells, style=_COLOURS.get(row.state, "dim"))
        wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if wide <= console.width:
            break
    console.print(table)
    if hidden:
        names = ", ".join(column.name for column in hidden)
        print(f"The screen is too narrow for {names}: see table.md.")


def broken_name(name: str) -> str:
    """Return a name broken into lines after dots and slashes, and in long words at underscores."""
    parts = re.split(r"(?<=[/.])", name)
    pieces = [p if len(p) <= _LONG_WORD else re.sub(r"_(?=.)", "_\n", p) for p in parts]
    return "\n".join(pieces)


def as_markdown(columns: Sequence[Column]) -> str:
    """Return the table as Markdown, with all columns."""
    lines = [
        [column.name for column in columns],
        ["---" if column.left else "---:" for column in columns],
        *zip(*(column.cells for column in columns), strict=True),
    ]
    escaped = ([" ".join(c.split()).replace("|", "\\|") for c in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def in_words(rows: Sequence[Row], same: Mapping[str, str], shared: Sequence[str]) -> str:
    """Return sentences on what is equal, what differs and what was not tuned.

    Args:
        rows: the rows of the table.
        same: the columns that `columns_of` left out.
        shared: overrides that all trials have.
    """
    equal = ", ".join(f"{k} {v}" for k, v in same.items() if k != "n" and v)
    seeds = {row.seeds for row in rows if row.state == "done"}
    number = f"{min(seeds, default=1)}" + (f" to {max(seeds)}" if len(seeds) > 1 else "")
    states = [row.state for row in rows if row.state != "done"]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    settings = in_line(" ".join(shared)) or "the defaults"
    differs = ", ".join(key for key in keys_of(rows) if key not in same) or "nothing"
    return (
        f"{f'Equal in all rows: {equal}. ' if equal else ''}"
        f"The trials differ in {differs}. All else is the same ({settings}; seeds in each: "
        f"{number}) and was not tuned for any of them. Ranked by the best validation value; "
        "± is the standard deviation over the seeds."
        f"{f' Not counted: {counts}.' if counts else ''}"
    )


# --- the picture ----------------------------------------------------------------------------------


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
        _draw_key(panel, key, [row for row in shown if key in row.trials[0].values], metric)
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


def _draw_key(panel: Any, key: str, rows: Sequence[Row], metric: Metric) -> None:
    """Draw the trials of these rows against one key; matplotlib puts texts side by side."""
    values = dict.fromkeys(row.trials[0].values[key] for row in rows)
    numbers = _numbers(values)
    texts = shortened(values)
    places: dict[str, Any] = numbers or {value: _short(texts[value]) for value in values}
    points: dict[Any, list[float]] = {place: [] for place in places.values()}
    for trial in (trial for row in rows for trial in row.trials):
        if metric.name in trial.results:
            points[places[trial.values[key]]].append(trial.results[metric.name])
    pairs = [(place, result) for place, results in points.items() for result in results]
    panel.plot(*zip(*pairs, strict=True), "o", color="C0", alpha=0.45, ms=5, mew=0)
    if len(points) <= _MEANS or not numbers:
        style = {"ls": "-" if numbers else "none", "marker": "_", "ms": 12, "mew": 2}
        means = [(place, math.fsum(r) / len(r)) for place, r in points.items() if r]
        panel.plot(*zip(*means, strict=True), **style, color="C1", zorder=1.5, label="mean")
    spread = f"{metric.name}_std"
    several = [row for row in rows if row.seeds > 1 and spread in row.results]
    if several:
        x = [places[row.trials[0].values[key]] for row in several]
        y, deviations = zip(
            *((row.results[metric.name], row.results[spread]) for row in several), strict=True
        )
        panel.errorbar(
            x, y, deviations, fmt="none", color="C0", alpha=0.6, lw=1.2, label="± over seeds"
        )
    if _spans(numbers.values(), 100 if all(map(float.is_integer, numbers.values())) else 10):
        panel.set_xscale("log")
    if not numbers and sum(map(len, points)) > _LONGEST:
        panel.tick_params(axis="x", rotation=90)
    panel.set(xlabel=_short(key))


def _numbers(texts: Iterable[str]) -> dict[str, float]:
    """Return the values as sorted numbers; empty if one of them is not a finite number."""
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        return {}
    finite = all(map(math.isfinite, numbers.values()))
    return dict(sorted(numbers.items(), key=lambda item: item[1])) if finite else {}


def _short(text: str) -> str:
    """Return a text shortened for the plot, in which matplotlib finds no formula."""
    return in_picture(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def _spans(values: Iterable[float], times: float) -> bool:
    """Return whether the smallest value is positive and the largest is `times` as large."""
    values = list(values)
    return bool(values) and min(values) > 0 and max(values) >= times * min(values)
