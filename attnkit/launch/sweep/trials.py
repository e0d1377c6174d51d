"""Runs the trials of a sweep, each from its job to its end, and then reports on all of them.

A trial runs under its lock, and only if its folder shows that it has not ended, so that no trial
runs twice. `main` runs a trial in a process of its own, which launchers.py starts.
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
from attnkit.launch.processes.process import end_on_signals, ignore_signals, raise_received
from attnkit.launch.processes.ranks import end_with
from attnkit.launch.processes.torchrun import VARIABLES
from attnkit.launch.several import carry_out
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
    """A trial to run, and its job; plain data that is sent to other processes."""

    trial: Trial
    job: Job
    one_gpu: bool = False
    """Whether the trial needs exactly one GPU, and any will do."""
    attempts: int | None = None
    """Number of earlier failures of a failed trial, so that a late process does not retry it."""
    config_dir: Path | None = None
    more: tuple[str, ...] = ()
    """Overrides that are not recorded, for composing again if the trial is resumed."""

    @classmethod
    def of(
        cls,
        composer: Composer,
        trial: Trial,
        more: Sequence[str],
        pruning: Mapping[str, Any] | None = None,
    ) -> "Order":
        """Return the order of a trial: to resume if it has made progress, else to run it whole.

        Args:
            composer: the composer of the overrides.
            trial: the trial.
            more: overrides that are not recorded.
            pruning: the pruning callback of a trial that begins.

        Raises:
            UserError: an override is wrong.
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
        """Whether the trial must still be run."""
        state = progress(self.trial.folder)
        is_tried_again = state == "failed" and self.attempts == len(self.trial.errors)
        return state in ("interrupted", "waiting") or is_tried_again


def checked(composer: Composer, trial: Trial, allow: Sequence[str]) -> Order:
    """Return the order of a trial that has not begun; an error names the trial."""
    try:
        return Order.of(composer, trial, allow)
    except UserError as error:
        lines = [*str(error).splitlines()[:2], f"  in the trial {' '.join(trial.overrides)}"]
        raise UserError("\n".join(lines)) from error


def orders_of(
    composer: Composer,
    wanted: Iterable[Trial],
    more: Sequence[str],
    pruning: Callable[[Trial], Mapping[str, Any]] = lambda trial: {},
) -> list[Order]:
    """Return the orders of recorded trials; a trial with invalid overrides is marked as failed."""
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
    """Run trials of a sweep, report on the sweep, and return the exit code.

    Args:
        run: the method `run` of a launcher.
        sweep: the sweep with the permissions of this command.
        batches: orders to run at once; the next batch is drawn when the one before has ended.
    """
    shared = sweep.folder / ".shared"
    os.environ[SHARED_FOLDER] = str(shared)  # where trials share decoded images
    try:
        for orders in filter(None, batches):
            run(orders)
    except (KeyboardInterrupt, StoppedBySignal) as error:
        by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else "interrupted"
        raise Interrupted(
            f"{getattr(error, 'reason', by)}; the trials after it were not started",
            f"\nto go on: {to_go_on(sweep)}",
            getattr(error, "code", INTERRUPTED),
        ) from None
    except Exception as error:
        raise_received()
        fail(error, CRASHED)  # the launcher failed; report on the trials that did run
        finish(sweep.folder)
        return CRASHED
    finally:
        del os.environ[SHARED_FOLDER]
        shutil.rmtree(shared, ignore_errors=True)
    return finish(sweep.folder)


def run_here(order: Order) -> None:
    """Run a trial in this process, and print its outcome in one line."""
    _run(order, _printing_apart(order.trial))
    print(line_of(order.trial.now()), flush=True)


def main(argv: Sequence[str] = ()) -> int:
    """Run a trial, read as an `Order` from stdin, in this process; it starts its own ranks."""
    for name in VARIABLES:  # set by a batch system for the job in which this process runs
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
    """Run a trial unless another process runs it or has run it; print and save its error."""
    trial, job = order.trial, order.job
    with locked(trial.lock) as mine:
        if not mine or not order.is_open:
            return
        try:
            _keep_former_error(trial)
            if not has_progress(trial.folder):
                _clear(trial.folder)
            elif not job.resumed:  # a batch system has ended the trial and starts it again
                words = [setting("resume", trial.folder), *order.more]
                job = decide(Request.read(Composer(order.config_dir), words))
            with printing or nullcontext():
                carry_out(job)
        except Exception as error:
            raise_received()  # code that a signal interrupts may fail in any way
            if progress(trial.folder) != "pruned":
                save_error(trial.folder, summary(error))
                fail(error, CRASHED, f"trial {trial.number}: ")


def has_progress(folder: Path) -> bool:
    """Return whether a run can be resumed: it has a checkpoint, or a finished seed or split."""
    if not (folder / folders.CONFIG).is_file():
        return False
    parts = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    return any(folders.is_finished(part) for part in parts[1:]) or any(
        next(part.glob(f"{folders.CHECKPOINTS}/*.ckpt"), None) for part in parts
    )


def _keep_former_error(trial: Trial) -> None:
    """Rename error.txt of the previous attempt to error_1.txt, error_2.txt, …"""
    if progress(trial.folder) == "failed":
        (trial.folder / ERROR).rename(trial.folder / f"error_{len(trial.errors) + 1}.txt")


def save_error(folder: Path, text: str) -> None:
    """Write a trial's error, which marks it as failed."""
    write_text(folder / ERROR, f"{text}\n")


def _clear(folder: Path) -> None:
    """Delete everything but the lock, the logs and the errors of earlier attempts."""
    from attnkit.launch.console import LOG

    kept = (LOG, OUTPUT, folders.LOCK)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in kept and not path.match("error_*.txt"):
            path.unlink()


def line_of(trial: Trial) -> str:
    """Return a line such as `trial 3  optimizer.lr=0.00121  val/loss_best 0.557  4.18 s  done`."""
    parts = [_begin_of(trial)]
    if trial.state == "done":
        try:
            name = Metric.of(folders.load_config(trial.folder)).name
        except UserError:  # the configuration was deleted
            name = ""
        figures = ((name, f"{name} "), ("seconds", ""))
        parts += [f"{label}{figure(trial.results, name)}"
                  for name, label in figures if name in trial.results]  # fmt: skip
    parts.append(trial.state)
    if trial.state == "pruned":
        parts.append(trial.error.splitlines()[0])
    return in_line("  ".join(parts))


def _begin_of(trial: Trial) -> str:
    """Return the number and the values of a trial as text."""
    values = (f"{k}={shortened([v])[v]}" for k, v in trial.values.items())
    return in_line(f"trial {trial.number}  {' '.join(values)}".rstrip())


@contextmanager
def _printing_apart(trial: Trial) -> Iterator[None]:
    """Redirect output to a file in the trial's folder; a terminal shows that the trial runs."""
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
    """A stream that can be redirected for a while, so that no logger keeps a closed stream."""

    def __init__(self, own: Any, pointed_to: Any) -> None:
        self.own, self.pointed_to = own, pointed_to

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pointed_to, name)
