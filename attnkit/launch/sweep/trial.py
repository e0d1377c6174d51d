"""One trial of a sweep: from its record to its end, under its lock, so that nothing runs twice.

`main` is a trial in a process of its own, as launch/sweep/launchers.py starts it.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit.launch import folder as folders
from attnkit.launch.command import key_of, setting
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Job, Request, decide
from attnkit.launch.errors import CRASHED, fail, guarded, summary
from attnkit.launch.processes.locks import locked
from attnkit.launch.processes.torchrun import VARIABLES
from attnkit.launch.several import carry_out
from attnkit.launch.signals import end_on_signals, ignore_signals, raise_received
from attnkit.launch.sweep.ranking import Metric, figure
from attnkit.launch.sweep.record import ERROR, OUTPUT, Trial, progress, read_sweep, shortened
from attnkit.lightning.console import cell, in_line
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import write_text


@dataclass(frozen=True)
class Order:
    """What is to be done with the trials of a sweep; plain data, for other processes."""

    sweep: str
    config_dir: str | None = None
    allow: tuple[str, ...] = ()
    """Overrides that permit the user's packages."""
    changes: tuple[str, ...] = ()
    """Overrides for trials that are run again."""
    retry: bool = False
    """Run also trials that have failed."""
    attempts: Mapping[str, int] | None = None
    """With `retry`: how often each had failed before, so that no late job tries one twice."""
    study: tuple[str, ...] = ()
    """Overrides by which a trial reports to the study it belongs to."""

    def wants(self, trial: Trial) -> bool:
        """Whether this trial is still to be run."""
        state = progress(trial.folder)
        before = (self.attempts or {}).get(str(trial.number))
        is_tried_again = self.retry and state == "failed" and before == len(trial.errors)
        return state in ("interrupted", "waiting") or is_tried_again


def run_here(order: Order, number: int) -> None:
    """Run a trial in this process, and say in one line what came of it."""
    run_alone(order, number, apart=True)
    print(line_of(read_sweep(Path(order.sweep)).trials[number]), flush=True)


def run_alone(order: Order, number: int, *, apart: bool = False) -> None:
    """Run a trial unless another process does or did. Its error is printed, and a file.

    Args:
        order: what the trial is told.
        number: of the trial.
        apart: what it prints goes to its folder.
    """
    trial = read_sweep(Path(order.sweep)).trials[number]
    with locked(trial.lock) as mine:
        if not mine or not order.wants(trial):
            return
        try:
            if progress(trial.folder) == "failed":  # error.txt becomes error_1.txt, …
                kept = trial.folder / f"error_{len(trial.errors) + 1}.txt"
                (trial.folder / ERROR).rename(kept)
            if not has_progress(trial.folder):
                _clear(trial.folder)
            job = job_of(order, trial)
            with _printing_apart(trial) if apart else nullcontext():
                carry_out(job)
        except Exception as error:
            raise_received()  # what a signal has broken off may fail in any way
            if progress(trial.folder) != "pruned":
                save_error(trial.folder, summary(error))
                fail(error, CRASHED, f"trial {number}: ")


def job_of(order: Order, trial: Trial) -> Job:
    """What is to be done: to go on from a checkpoint where there is one, else the whole of it."""
    composer = Composer(Path(order.config_dir) if order.config_dir else None)
    if has_progress(trial.folder):
        resume = setting("resume", trial.folder)
        return decide(Request.read(composer, [resume, *order.changes, *order.allow]))
    study = [*order.study, f"++callbacks.pruning.number={trial.number}"] if order.study else []
    overrides = [*trial.overrides, *order.changes, *study, *order.allow]
    return decide(Request.read(composer, overrides), trial.folder)


def has_progress(folder: Path) -> bool:
    """Whether there is something to go on from: a checkpoint, or a seed or split that is done."""
    if not (folder / folders.CONFIG).is_file():
        return False
    parts = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    return any(folders.is_finished(part) for part in parts[1:]) or any(
        next(part.glob(f"{folders.CHECKPOINTS}/*.ckpt"), None) for part in parts
    )


def save_error(folder: Path, text: str) -> None:
    """Mark a trial as failed."""
    write_text(folder / ERROR, f"{text}\n")


def _clear(folder: Path) -> None:
    """Leave only the lock, the logs and the errors of the attempts before."""
    from attnkit.launch.console import LOG

    kept = (LOG, OUTPUT, folders.LOCK)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in kept and not path.match("error_*.txt"):
            path.unlink()


def takes_one_gpu(order: Order, trial: Trial) -> bool:
    """Whether a trial takes one GPU, whichever it is."""
    if "trainer.devices" in map(key_of, (*trial.overrides, *order.changes)):
        return False
    trainer = job_of(order, trial).config.get("trainer") or {}
    kind = trainer.get("accelerator") or "auto"
    return kind in ("auto", "gpu", "cuda") and trainer.get("devices") in (1, "1")


def line_of(trial: Trial) -> str:
    """`trial 3  optimizer.lr=0.00121  val/loss_best 0.557  4.18 s  done`."""
    parts = [_begin_of(trial)]
    if trial.state == "done":
        try:
            name = Metric.of(folders.load_config(trial.folder)).name
        except UserError:  # not there any more
            name = ""
        figures = ((name, f"{name} "), ("seconds", ""))
        parts += [f"{said}{figure(trial.results, name)}"
                  for name, said in figures if name in trial.results]  # fmt: skip
    parts.append(trial.state)
    if trial.state == "pruned":
        parts.append(trial.error.splitlines()[0])
    return in_line("  ".join(parts))


def _begin_of(trial: Trial) -> str:
    """Its number and its values."""
    values = (f"{k}={shortened([v])[v]}" for k, v in trial.values.items())
    return in_line(f"trial {trial.number}  {' '.join(values)}".rstrip())


@contextmanager
def _printing_apart(trial: Trial) -> Iterator[None]:
    """What is printed in the block goes to the trial's folder; a terminal shows that it runs."""
    from rich.console import Console

    console = Console(highlight=False)
    where = cell(f"{_begin_of(trial)}  {trial.folder}")
    running = console.status(where, refresh_per_second=1) if console.is_terminal else nullcontext()
    with (
        (trial.folder / OUTPUT).open("a", encoding="utf-8", errors="backslashreplace") as output,
        running,
    ):
        streams = _Stream(sys.stdout), _Stream(sys.stderr)
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            try:
                for stream in streams:
                    stream.pointed_to = output
                yield
            finally:
                for stream in streams:
                    stream.pointed_to = stream.own


class _Stream:
    """A stream that is redirected for a while, so that a logger which keeps it never holds a closed
    one."""

    def __init__(self, own: Any) -> None:
        self.own = self.pointed_to = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pointed_to, name)


def main(argv: Sequence[str]) -> int:
    """Run a trial in a process of its own, which starts its ranks itself.

    Args:
        argv: an `Order` as JSON, and the number of the trial.
    """
    from attnkit.launch.processes.one_rank import end_with

    for name in VARIABLES:  # a batch system's, of the job in which this process runs
        os.environ.pop(name, None)

    given = json.loads(argv[0])
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    order = Order(**values)
    end_with(os.getppid())

    def run() -> int:
        end_on_signals()
        run_alone(order, int(argv[1]))
        return 0

    code = guarded(run)
    ignore_signals()
    return code
