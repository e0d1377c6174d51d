"""Output of a run: a line at the start, tables at the end, and everything also in run.log."""

from __future__ import annotations

import csv
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import get_console
from rich.table import Table

from attnkit.launch.folder import RESULTS
from attnkit.lightning.console import cell, say, say_table, seconds, visible, with_prefix
from attnkit.lightning.console import log as _log
from attnkit.lightning.errors import RunError, UserError

if TYPE_CHECKING:
    from attnkit.launch.decide import Job
    from attnkit.launch.run import Run

LOG = "run.log"
PREDICTIONS = "predictions.csv"
_MAX_ROWS = 20

# Messages of libraries that a user of attnkit can do nothing about.
_UNHELPFUL = re.compile(
    r"does not have many workers|smaller than the logging interval|exists and is not empty"
    r"|LeafSpec|litlogger|when using `ckpt_path`|Checkpoint directory"
    r"|destroy_process_group|lr_scheduler\.step|epoch parameter in `scheduler"
    r"|[GTM]PU available|estimate number of stepping|Restor(ing|ed) (states|all states)"
    r"|Loaded model weights",
    re.IGNORECASE,
)


def quiet(rank: int = 0) -> None:
    """Show only warnings of Lightning and Python on screen, in one line each and on rank 0 only."""
    import lightning.pytorch  # noqa: F401  # makes its loggers

    for logger in _lightning_loggers():
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.ERROR if rank else logging.WARNING)
    warnings.showwarning = _keep_warning if rank else _show_warning
    _log.setLevel(logging.INFO)
    _log.propagate = False
    if not _log.handlers:  # before there is a run.log, Python would write to stderr
        _log.addHandler(logging.NullHandler())
    notices = logging.getLogger("attnkit")
    notices.setLevel(logging.WARNING if rank else logging.INFO)
    if not notices.handlers:
        notices.addHandler(_Notices())


class _Visible(logging.Formatter):
    """Formatter that escapes control characters, which names of files could send to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Notices(logging.Handler):
    """Handler that prints log messages of attnkit's modules as lines of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def logging_to(folder: Path, rank: int = 0, *, own: bool = False) -> Iterator[None]:
    """Write all output, Lightning's messages, all warnings and a traceback to run.log as well.

    Ranks other than 0 write only if they fail; with `own`, they write everything to their own file.
    """
    file = logging.FileHandler(
        folder / (f"run_rank{rank}.log" if rank and own else LOG), encoding="utf-8", delay=True
    )
    prefix = f"rank {rank}: " if rank and not own else ""
    file.addFilter(lambda record: not _UNHELPFUL.search(record.getMessage()))
    file.setFormatter(_Visible(f"%(asctime)s {prefix}%(message)s", "%Y-%m-%d %H:%M:%S"))
    handler: logging.Handler = file
    if rank and not own:  # messages stay in memory unless an error occurs
        handler = MemoryHandler(10_000, logging.ERROR, target=file, flushOnClose=False)
    loggers = [_log, *_lightning_loggers()]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    except (UserError, RunError) as error:
        _log.error("%s", error)
        raise
    except Exception:
        _log.exception("failed")
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
        file.close()


def _lightning_loggers() -> list[logging.Logger]:
    """Return Lightning's loggers that have a handler of their own."""
    names = ("lightning", "lightning.pytorch", "lightning.fabric")
    return [log for log in map(logging.getLogger, names) if log.handlers]


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    if _is_for_user(message, category, filename):
        _keep_warning(message, category, filename, lineno)
        print_(f"[yellow]warning[/yellow] {cell(_one_line(message)[:400])}")


def _keep_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    if _is_for_user(message, category, filename):
        name = Path(filename).name
        _log.warning("%s %s:%d: %s", category.__name__, name, lineno, _one_line(message))


def _is_for_user(message: Warning | str, category: type[Warning], filename: str) -> bool:
    """Return whether the user can act on a warning; deprecations only in the user's own code."""
    text = _one_line(message)
    old = issubclass(category, DeprecationWarning | FutureWarning) or "deprecat" in text.lower()
    return not (old and "site-packages" in filename) and not _UNHELPFUL.search(text)


def _one_line(message: Warning | str) -> str:
    return " ".join(str(message).split())


def print_(text: object) -> None:
    """Print to the screen, not to run.log."""
    get_console().print(text, soft_wrap=True, highlight=False)  # above a progress bar, not into it


def header(job: Job, run: Run) -> None:
    """Print the task, the mode, the model, the device and the run folder."""
    device = run.trainer.strategy.root_device.type
    world = run.trainer.world_size
    processes = f" × {world} processes" if world > 1 else ""
    model = f"{type(run.module).__name__}, {run.num_parameters:,} parameters"
    again = ", going on" if job.resumed else ""
    say(f"{job.config['task']} · {job.config['run']}{again} · {model} · {device}{processes}")
    say(f"in {job.folder}")
    if job.changes:
        say(f"changed: {' '.join(job.changes)}")


def final(job: Job, results: Mapping[str, float]) -> None:
    """Print the results and the paths of the files that were written."""
    if job.mode.stage == "predict":
        say_table(predictions(job.folder))
    if not job.mode.has_table:
        for table in tables(f"{job.config['task']} · {job.config['run']}", results):
            say_table(table)
    folder = job.folder
    files = {
        "best": folder / "checkpoints" / "best.ckpt",
        "bench": folder / "bench.md",
        "curves": folder / "learning_curves.png",
        "confusion": folder / "confusion_matrix.png",
        "nodes": folder / "accuracy_by_neighbourhood.png",
        "entropy": folder / "attention_entropy.png",
        "links": folder / "link_scores.png",
        "pictures": folder / "interpret",
        "metrics": folder / "metrics.csv",
        "steps": folder / "steps.csv",
        "predictions": folder / PREDICTIONS,
        "attention": folder / "attention.csv",
        "page": folder / "explain.html",
        "layers": folder / "layers.png",
        "scores": folder / "scores.csv",
        "maps": folder / "maps.npz",
        "export": Path((job.config.get("export") or {}).get("folder") or folder / "export"),
        "results": folder / RESULTS,
    }
    for name, path in files.items():
        if path.exists():
            say(f"  {name:<12} {path}")


def predictions(folder: Path) -> Table:
    """Return a table of the first rows of predictions.csv."""
    with (folder / PREDICTIONS).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    title = f"predictions, the first {_MAX_ROWS} of {len(rows)}"
    table = Table(title=title if len(rows) > _MAX_ROWS else "predictions", title_justify="left")
    # a column p(…) for each class would make the table too wide
    names = [name for name in reader.fieldnames or ["nothing"] if not name.startswith("p(")]
    for name in names:
        table.add_column(cell(name), overflow="fold")
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(cell(row[name] or "") for name in names))
    return table


# --- the results of a run as two tables -----------------------------------------------------------

_COLUMNS = {
    ("test/", ""): "test",
    ("val/", "_best"): "val, best epoch",
    ("val/", "_last"): "val, last epoch",
    ("val/", ""): "val",
}
"""Column of the table for each stage and ending of a metric's name."""


def tables(title: str, results: Mapping[str, float]) -> Iterator[Table]:
    """Yield a table of the metrics in results.json, one column per stage, and one of the rest."""
    shown = {name: text for name, text in _texts(results).items() if f"{name}_last" not in results}
    metrics: dict[str, dict[str, str]] = {}
    for name in list(shown):
        metric, column = _place(name)
        if column:
            metrics.setdefault(metric, {})[column] = shown.pop(name)
    if metrics:
        columns = [c for c in _COLUMNS.values() if any(c in row for row in metrics.values())]
        table = Table("metric", title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for metric in sorted(metrics):
            table.add_row(cell(metric), *(metrics[metric].get(column, "") for column in columns))
        if "best_epoch" in results and "test" in columns:
            table.caption = "test: the checkpoint of the best epoch"
            table.caption_justify = "left"
        yield table
    if shown:
        rest = Table(title=None if metrics else title, title_justify="left", show_header=False)
        rest.add_column()
        rest.add_column(justify="right")
        for name in sorted(shown, key=lambda name: ("/" not in name, name)):
            rest.add_row(cell(name), shown[name])
        yield rest


def _texts(results: Mapping[str, float]) -> dict[str, str]:
    """Return every number as text, with its standard deviation over several seeds."""
    several = results["num_seeds"] > 1
    texts = {}
    for name, value in results.items():
        if name.endswith("_std") or name == "num_seeds" or name.startswith("kernels/"):
            continue
        texts[name] = _text(name, value)
        if several and f"{name}_std" in results:
            texts[name] += f" ± {_text(name, results[f'{name}_std'])}"
    if several:
        texts["num_seeds"] = str(int(results["num_seeds"]))
    kernels = sorted({n.rpartition("/")[2] for n in results if n.startswith("kernels/")})
    if kernels:
        texts["attention kernels"] = ", ".join(kernels)
    return texts


def _place(name: str) -> tuple[str, str]:
    """Return the metric and the column of a result; the column is empty if it has no stage."""
    for (stage, ending), column in _COLUMNS.items():
        if name.startswith(stage) and name.endswith(ending):
            return name.removeprefix(stage).removesuffix(ending), column
    return name, ""


def _text(name: str, value: float) -> str:
    if name.startswith("difference/"):
        return f"{value:.1e}"
    if name.endswith("_per_second"):
        return f"{with_prefix(value)}/s"
    if name.endswith("seconds"):
        return seconds(value)
    whole = float(value).is_integer() and abs(value) >= 1 and not _place(name)[1]
    return f"{value:,.0f}" if whole else f"{value:.4f}"
