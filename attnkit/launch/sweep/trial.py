"""One trial of a sweep: from its record to its end, under its lock, so that nothing runs twice.

`main` is a trial in a process of its own, as launch/sweep/launchers.py starts it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit.launch.command import key_of, setting
from attnkit.launch.config.compose import Composer
from attnkit.launch.errors import CRASHED, fail, guarded, summary
from attnkit.launch.job import folder as folders
from attnkit.launch.job.execute import execute
from attnkit.launch.job.job import Job
from attnkit.launch.job.request import Request, decide
from attnkit.launch.processes import gpus as devices
from attnkit.launch.processes.locks import holder, locked
from attnkit.launch.processes.torchrun import VARIABLES
from attnkit.launch.signals import end_on_signals, ignore_signals, raise_received
from attnkit.launch.sweep.line import line_of, printing_apart
from attnkit.launch.sweep.record import ERROR, OUTPUT, Trial, progress, read_sweep
from attnkit.lightning.files import write_text

Within = Callable[[Trial], AbstractContextManager[None]]


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
    """Run the trials that have failed; otherwise those that have not ended."""
    attempts: Mapping[str, int] | None = None
    """With `retry`: how often each had failed before, so that none is tried twice."""
    devices: tuple[str, ...] = ()
    """One for each trial, where several run at once."""
    study: tuple[str, ...] = ()
    """Overrides by which a trial reports to the study it belongs to."""

    def wants(self, trial: Trial) -> bool:
        """Whether this trial is still to be run."""
        state = progress(trial.folder)
        if self.retry:
            before = (self.attempts or {}).get(str(trial.number))
            return state == "failed" and before == len(trial.errors)
        return state in ("interrupted", "waiting")


def run_trial(order: Order, number: int) -> None:
    """Run a trial here, and say in one line what came of it."""
    mine = run_alone(order, number, printing_apart)
    trial = read_sweep(Path(order.sweep)).trials[number]
    print(line_of(trial) if mine else f"trial {number} is run by {holder(trial.lock)}", flush=True)


def run_alone(order: Order, number: int, within: Within = lambda _: nullcontext()) -> bool:
    """Run a trial unless another process does or did; returns whether no other process does.

    Its error is printed, and a file in its folder.
    """
    trial = read_sweep(Path(order.sweep)).trials[number]
    with locked(trial.lock) as mine:
        if not mine:
            return False
        if not order.wants(trial):
            return True
        try:
            if progress(trial.folder) == "failed":  # error.txt becomes error_1.txt, …
                kept = trial.folder / f"error_{len(trial.errors) + 1}.txt"
                (trial.folder / ERROR).rename(kept)
            if not has_progress(trial.folder):
                _clear(trial.folder)
            job = job_of(order, trial)
            with _own_device(order, trial, job), within(trial):
                execute(job)
        except Exception as error:
            raise_received()  # what a signal has broken off may fail in any way
            if progress(trial.folder) == "pruned":
                return True
            save_error(trial.folder, summary(error))
            fail(error, CRASHED, f"trial {number}: ")
    return True


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
    from attnkit.launch.job.screen import LOG

    kept = (LOG, OUTPUT, folders.LOCK)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in kept and not path.match("error_*.txt"):
            path.unlink()


@contextmanager
def _own_device(order: Order, trial: Trial, job: Job) -> Iterator[None]:
    """A GPU that no other trial on this machine has, where this one wants one and named none."""
    typed = map(key_of, (*trial.overrides, *order.changes))
    chosen = "trainer.devices" in typed
    if not order.devices or chosen or not devices.is_wanted(job.config.get("trainer") or {}):
        yield
        return
    with devices.reserved(order.devices) as device:
        os.environ[devices.VARIABLE] = device  # torch, which reads it, is not imported yet
        print(f"on GPU {device}", flush=True)
        yield


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
