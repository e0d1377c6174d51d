"""What a run says: a line at its start, tables at its end, and all of it in run.log."""

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

# What no one can act on in a run that attnkit set up.
_UNHELPFUL = re.compile(
    r"does not have many workers|smaller than the logging interval|exists and is not empty"
    r"|LeafSpec|litlogger|when using `ckpt_path`|Checkpoint directory"
    r"|destroy_process_group|lr_scheduler\.step|epoch parameter in `scheduler"
    r"|[GTM]PU available|estimate number of stepping|Restor(ing|ed) (states|all states)"
    r"|Loaded model weights",
    re.IGNORECASE,
)


def quiet(rank: int = 0) -> None:
    """On screen only warnings: Lightning's, Python's in one line each, and only on rank 0."""
    import lightning.pytorch  # noqa: F401  # makes its loggers

    for logger in _lightnings():
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
    """Names of files and classes do nothing to the terminal that shows the log, either."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Notices(logging.Handler):
    """What attnkit's parts say by Python's logging: a line of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def logging_to(folder: Path, rank: int = 0, *, own: bool = False) -> Iterator[None]:
    """Everything that is said, Lightning's messages, all warnings and a traceback also to run.log.

    Of the ranks beyond 0 only when they fail; with `own`, all of it to a file of their own.
    """
    file = logging.FileHandler(
        folder / (f"run_rank{rank}.log" if rank and own else LOG), encoding="utf-8", delay=True
    )
    prefix = f"rank {rank}: " if rank and not own else ""
    file.addFilter(lambda record: not _UNHELPFUL.search(record.getMessage()))
    file.setFormatter(_Visible(f"%(asctime)s {prefix}%(message)s", "%Y-%m-%d %H:%M:%S"))
    handler: logging.Handler = file
    if rank and not own:  # until an error comes, or for ever
        handler = MemoryHandler(10_000, logging.ERROR, target=file, flushOnClose=False)
    loggers = [_log, *_lightnings()]
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


def _lightnings() -> list[logging.Logger]:
    """Lightning's loggers that have a handler of their own."""
    names = ("lightning", "lightning.pytorch", "lightning.fabric")
    return [log for log in map(logging.getLogger, names) if log.handlers]


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    if _is_hers(message, category, filename):
        _keep_warning(message, category, filename, lineno)
        print_(f"[yellow]warning[/yellow] {cell(_one_line(message)[:400])}")


def _keep_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    if _is_hers(message, category, filename):
        name = Path(filename).name
        _log.warning("%s %s:%d: %s", category.__name__, name, lineno, _one_line(message))


def _is_hers(message: Warning | str, category: type[Warning], filename: str) -> bool:
    """Whether the user can act on a warning: a deprecation, only in the user's own code."""
    text = _one_line(message)
    old = issubclass(category, DeprecationWarning | FutureWarning) or "deprecat" in text.lower()
    return not (old and "site-packages" in filename) and not _UNHELPFUL.search(text)


def _one_line(message: Warning | str) -> str:
    return " ".join(str(message).split())


def print_(text: object) -> None:
    """To the screen only."""
    get_console().print(text, soft_wrap=True, highlight=False)  # above a progress bar, not into it


def header(job: Job, run: Run) -> None:
    """What runs, on what, and where it writes."""
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
    """The figures and where everything is."""
    if job.mode.stage == "predict":
        say_table(predictions(job.folder))
    if not job.mode.has_table:
        for table in tables(f"{job.config['task']} · {job.config['run']}", results):
            say_table(table)
    folder = job.folder
    left = {
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
    for name, path in left.items():
        if path.exists():
            say(f"  {name:<12} {path}")


def predictions(folder: Path) -> Table:
    """The first rows of predictions.csv."""
    with (folder / PREDICTIONS).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    title = f"predictions, the first {_MAX_ROWS} of {len(rows)}"
    table = Table(title=title if len(rows) > _MAX_ROWS else "predictions", title_justify="left")
    names = [name for name in reader.fieldnames or ["nothing"] if not name.startswith("p(")]
    for name in names:  # those of each class would make it too wide
        table.add_column(cell(name), overflow="fold")
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(cell(row[name] or "") for name in names))
    return table


# --- the figures of a run as two tables ----------------------------------------------------------

_COLUMNS = {
    ("test/", ""): "test",
    ("val/", "_best"): "val, best epoch",
    ("val/", "_last"): "val, last epoch",
    ("val/", ""): "val",
}
"""For each stage and ending of a metric's name, the column that it stands in."""


def tables(title: str, results: Mapping[str, float]) -> Iterator[Table]:
    """The metrics of results.json, a row for each and a column for each stage, and all else."""
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
    """Every figure as it is shown, with its deviation over several seeds."""
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
    """The metric and the column of a figure: no column for one of no stage that is shown."""
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
