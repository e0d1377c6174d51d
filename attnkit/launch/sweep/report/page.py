"""`run=report sweep=DIR`, and the end of every sweep: a ranked table, a picture, the best command.

Only files of the sweep's own folder are written; its trials are read. Neither torch nor Hydra is
needed for it.
"""

import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnkit.launch.command import command_line, key_of, setting
from attnkit.launch.errors import CRASHED, summary
from attnkit.launch.job import folder as folders
from attnkit.launch.job.request import Request
from attnkit.launch.sweep.record import Sweep, Trial, find_sweep, read_sweep, to_go_on
from attnkit.launch.sweep.report import picture, ranking
from attnkit.launch.sweep.report.ranking import Metric, Row
from attnkit.launch.sweep.report.table import FILE as MARKDOWN
from attnkit.launch.sweep.report.table import Table
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import replacing, write_text
from attnkit.lightning.telling.numbers import three_digits
from attnkit.lightning.telling.text import in_line

FILE = "report.md"


def report(request: Request, launcher: object = None) -> int:
    """`run=report sweep=DIR`; returns the exit code."""
    for override in request.overrides:
        if key_of(override) not in ("run", "sweep"):
            raise UserError(f"{override}: not for run=report, which reads what lies in sweep=PATH")
    finish(find_sweep(request.config.get("sweep"), "sweep"))
    return 0


def finish(folder: Path) -> int:
    """Report on a sweep, on screen and in files; returns the exit code the sweep has earned."""
    sweep = read_sweep(folder)
    metric = Metric.of(saved_config(sweep))
    rows = ranking.ranked(sweep.trials, metric)
    figures = ranking.figures_of(rows, metric)
    others = (*sweep.keys, "run_dir")
    shared = [o for o in sweep.command if key_of(o) not in others and o not in sweep.hydra]
    drawn = Table.of(rows, figures)
    said = drawn.in_words(shared)
    drawn.show()
    print(said)
    ranking.save(folder / ranking.FILE, rows, figures)
    table = f"{drawn.as_markdown()}\n\n{said}\n"
    _save(folder / MARKDOWN, table)
    print(f"  table  {folder / ranking.FILE}\n         {folder / MARKDOWN}")
    if any(len(row.trials) > 1 for row in rows):
        each = ranking.ranked(sweep.trials, metric, by_seed=True)
        ranking.save(folder / ranking.EACH, each, figures)
        print(f"         {folder / ranking.EACH}")
    is_drawn = _draw(folder, rows, metric)
    if is_drawn:
        print(f"  plot   {folder / picture.FILE}")
    best = best_trial(rows, metric)
    _save(folder / FILE, _page(sweep, rows, metric, table, best, is_drawn=is_drawn))
    print(f"  report {folder / FILE}")
    if best:
        print(f"the best run, trial {best.number}:\n  {command_of(sweep, best)}")
    _say_what_is_left(sweep)
    return CRASHED if sweep.having("failed", "interrupted", "waiting") else 0


def best_command(folder: Path) -> str:
    """Of the best run of a sweep, as its report has it; nothing if nothing is done."""
    sweep = read_sweep(folder)
    metric = Metric.of(saved_config(sweep))
    best = best_trial(ranking.ranked(sweep.trials, metric), metric)
    return command_of(sweep, best) if best else ""


def best_trial(rows: Sequence[Row], metric: Metric) -> Trial | None:
    """The best of the trials in the best row."""
    if not rows or rows[0].rank is None:
        return None
    having = [trial for trial in rows[0].trials if metric.name in trial.results]
    return min(having, key=lambda trial: (metric.order(trial.results), trial.number))


def command_of(sweep: Sweep, trial: Trial) -> str:
    """The command that runs this trial by itself, quoted for a POSIX shell."""
    start = Path(sweep.working_dir)
    elsewhere = start.is_dir() and start != Path.cwd()
    place = f"cd {shlex.quote(sweep.working_dir)} && " if elsewhere else ""
    own = command_line(*trial.overrides, permission=sweep.permission)
    return in_line(f"{place}{own}")


def saved_config(sweep: Sweep) -> Mapping[str, Any]:
    """The configuration of a trial, for what all share; empty where none has begun."""
    for trial in (*sweep.having("done"), *sweep.trials):
        with suppress(UserError):  # not written yet, or broken
            return folders.load_config(trial.folder)
    return {}


def _draw(folder: Path, rows: Sequence[Row], metric: Metric) -> bool:
    """Whether there is a picture; one that goes wrong is a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of letters that a font lacks
            if figure := picture.draw(rows, metric):
                with replacing(folder / picture.FILE) as file:
                    figure.savefig(file, format="png", dpi=120)
        return figure is not None
    except Exception as error:
        print(f"warning: {picture.FILE} could not be drawn: {summary(error).splitlines()[0]}")
        return False


def _page(
    sweep: Sweep,
    rows: Sequence[Row],
    metric: Metric,
    table: str,
    best: Trial | None,
    *,
    is_drawn: bool,
) -> str:
    """report.md: all of it on one page."""
    parts = [f"# {sweep.folder.name}", table.strip()]
    if best:
        value = f"{metric.name} {three_digits(best.results[metric.name])}"
        again = f"## The best run\n\nTrial {best.number}, {value}, once more:"
        parts.append(f"{again}\n\n```bash\n{command_of(sweep, best)}\n```")
    if is_drawn:
        parts.append(f"![The metric against each parameter]({picture.FILE})")
    if failed := [row for row in rows if row.state == "failed"]:
        lines = [f"- trial {row.numbers}: `{row.error.replace('`', chr(39))}`" for row in failed]
        parts.append("\n".join(["## Errors", "", *lines]))
    return "\n\n".join([*parts, ""])


def _say_what_is_left(sweep: Sweep) -> None:
    if failed := sweep.having("failed"):
        words = ("run=retry", setting("sweep", sweep.folder))
        again = command_line(*words, permission=sweep.permission)
        print(in_line(f"{len(failed)} failed; to run them again: {again}"))
    for state in ("running", "interrupted", "waiting"):
        if those := sweep.having(state):
            print(in_line(f"{len(those)} {state}; to go on: {to_go_on(sweep)}"))


def _save(path: Path, text: str) -> None:
    write_text(path, text)
