"""Trials of a sweep: each from what was decided of it to its end, and all of them to the report.

A trial runs under its lock, and only while its folder says that it has not ended, so that nothing
runs twice. `main` is a trial in a process of its own, as launchers.py starts it.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from attnkit.launch import folder as folders
from attnkit.launch.command import key_of, setting
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Job, Request, decide
from attnkit.launch.errors import CRASHED, INTERRUPTED, Interrupted, fail, guarded, summary
from attnkit.launch.processes.locks import locked
from attnkit.launch.processes.one_rank import end_with
from attnkit.launch.processes.torchrun import VARIABLES
from attnkit.launch.several import carry_out
from attnkit.launch.signals import end_on_signals, ignore_signals, raise_received
from attnkit.launch.sweep.ranking import Metric, figure
from attnkit.launch.sweep.record import (
    ERROR,
    OUTPUT,
    Sweep,
    Trial,
    progress,
    shortened,
    to_go_on,
)
from attnkit.launch.sweep.report import finish
from attnkit.lightning.console import cell, in_line
from attnkit.lightning.errors import StoppedBySignal, UserError
from attnkit.lightning.files import SHARED_FOLDER, write_text


@dataclass(frozen=True)
class Order:
    """A trial that is to be run, and what was decided of it; plain data, for other processes."""

    trial: Trial
    job: Job
    one_gpu: bool = False
    """It takes one GPU, whichever it is."""
    attempts: int | None = None
    """Of a trial that has failed: how often before, so that no late process tries it twice."""
    config_dir: Path | None = None
    more: tuple[str, ...] = ()
    """With which it was decided, for one that goes on after all."""

    @classmethod
    def of(
        cls,
        composer: Composer,
        trial: Trial,
        more: Sequence[str],
        pruning: Mapping[str, Any] | None = None,
    ) -> "Order":
        """Go on from a checkpoint if there is one, else do the whole of the trial.

        Args:
            more: overrides that are not on record.
            pruning: a callback for a trial that is begun.

        Raises:
            UserError: something is wrong with the overrides.
        """
        if has_progress(trial.folder):
            job = decide(Request.read(composer, [setting("resume", trial.folder), *more]))
        else:
            request = Request.read(composer, [*trial.overrides, *more])
            if pruning:
                OmegaConf.update(request.config, "callbacks.pruning", pruning, force_add=True)
            job = decide(request, trial.folder)
        trainer = job.config.get("trainer") or {}
        is_on_gpu = (trainer.get("accelerator") or "auto") in ("auto", "gpu", "cuda")
        is_one = is_on_gpu and trainer.get("devices") in (1, "1")
        is_typed = "trainer.devices" in map(key_of, (*trial.overrides, *more))
        attempts = len(trial.errors) if trial.state == "failed" else None
        one_gpu = is_one and not is_typed
        return cls(trial, job, one_gpu, attempts, composer.config_dir, tuple(more))

    @property
    def is_open(self) -> bool:
        """Whether the trial is still to be run."""
        state = progress(self.trial.folder)
        is_tried_again = state == "failed" and self.attempts == len(self.trial.errors)
        return state in ("interrupted", "waiting") or is_tried_again


def checked(composer: Composer, trial: Trial, allow: Sequence[str]) -> Order:
    """The order of a trial that is not begun; what is wrong with it is an error now."""
    try:
        return Order.of(composer, trial, allow)
    except UserError as error:
        said = [*str(error).splitlines()[:2], f"  in the trial {' '.join(trial.overrides)}"]
        raise UserError("\n".join(said)) from error


def orders_of(
    composer: Composer,
    wanted: Iterable[Trial],
    more: Sequence[str],
    pruning: Callable[[Trial], Mapping[str, Any]] = lambda trial: {},
) -> list[Order]:
    """The orders of trials that are on record; one that cannot be decided has failed."""
    orders = []
    for trial in wanted:
        try:
            orders.append(Order.of(composer, trial, more, pruning(trial)))
        except UserError as error:
            with locked(trial.lock) as mine:
                if mine:
                    _keep_former_error(trial)
                    save_error(trial.folder, summary(error))
                    fail(error, CRASHED, f"trial {trial.number}: ")
    return orders


def run_trials(
    run: Callable[[Sequence[Order]], None], sweep: Sweep, batches: Iterable[Sequence[Order]]
) -> int:
    """Run trials of a sweep, then show all of it; returns the exit code.

    Args:
        run: that of a launcher.
        sweep: with what this command permits.
        batches: the next ones are asked for when those before have ended.
    """
    shared = sweep.folder / ".shared"
    os.environ[SHARED_FOLDER] = str(shared)  # where trials share decoded images
    try:
        for orders in filter(None, batches):
            run(orders)
    except (KeyboardInterrupt, StoppedBySignal) as error:
        by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else "interrupted"
        raise Interrupted(
            f"{getattr(error, 'said', by)}; the trials after it were not started",
            f"\nto go on: {to_go_on(sweep)}",
            getattr(error, "code", INTERRUPTED),
        ) from None
    except Exception as error:
        raise_received()
        fail(error, CRASHED)  # the launcher's; the trials that did run are worth a table
        finish(sweep.folder)
        return CRASHED
    finally:
        del os.environ[SHARED_FOLDER]
        shutil.rmtree(shared, ignore_errors=True)
    return finish(sweep.folder)


def run_here(order: Order) -> None:
    """Run a trial in this process, and say in one line what came of it."""
    _run(order, _printing_apart(order.trial))
    print(line_of(order.trial.now()), flush=True)


def main(argv: Sequence[str] = ()) -> int:
    """Run a trial in a process of its own, which starts its ranks itself: an `Order` on stdin."""
    for name in VARIABLES:  # a batch system's, of the job in which this process runs
        os.environ.pop(name, None)
    end_with(os.getppid())
    order: Order = pickle.load(sys.stdin.buffer)
    sys.path.extend(path for path in order.job.paths if path not in sys.path)

    def run() -> int:
        end_on_signals()
        _run(order)
        return 0

    code = guarded(run)
    ignore_signals()
    return code


def _run(order: Order, printing: Any = None) -> None:
    """Run a trial unless another process does or did. Its error is printed, and a file."""
    trial, job = order.trial, order.job
    with locked(trial.lock) as mine:
        if not mine or not order.is_open:
            return
        try:
            _keep_former_error(trial)
            if not has_progress(trial.folder):
                _clear(trial.folder)
            elif not job.resumed:  # a batch system has ended it, and starts it once more
                words = [setting("resume", trial.folder), *order.more]
                job = decide(Request.read(Composer(order.config_dir), words))
            with printing or nullcontext():
                carry_out(job)
        except Exception as error:
            raise_received()  # what a signal has broken off may fail in any way
            if progress(trial.folder) != "pruned":
                save_error(trial.folder, summary(error))
                fail(error, CRASHED, f"trial {trial.number}: ")


def has_progress(folder: Path) -> bool:
    """Whether there is something to go on from: a checkpoint, or a seed or split that is done."""
    if not (folder / folders.CONFIG).is_file():
        return False
    parts = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    return any(folders.is_finished(part) for part in parts[1:]) or any(
        next(part.glob(f"{folders.CHECKPOINTS}/*.ckpt"), None) for part in parts
    )


def _keep_former_error(trial: Trial) -> None:
    """Let error.txt of the attempt before become error_1.txt, …"""
    if progress(trial.folder) == "failed":
        (trial.folder / ERROR).rename(trial.folder / f"error_{len(trial.errors) + 1}.txt")


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
        out, err = _Stream(sys.stdout, output), _Stream(sys.stderr, output)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                yield
            finally:
                out.pointed_to, err.pointed_to = out.own, err.own


class _Stream:
    """A stream that is redirected for a while, so that a logger which keeps it never holds a closed
    one."""

    def __init__(self, own: Any, pointed_to: Any) -> None:
        self.own, self.pointed_to = own, pointed_to

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pointed_to, name)
