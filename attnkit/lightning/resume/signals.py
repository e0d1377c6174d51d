"""Ctrl-C, SIGTERM and SIGUSR1: finish the step, save, stop."""

import atexit
import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import distributed as dist

from attnkit.lightning import _private as private
from attnkit.lightning.errors import StoppedBySignal
from attnkit.lightning.resume.stop_signals import Once, handle, put_back


class SaveOnSignal(Checkpoint):
    """On Ctrl-C, SIGTERM or SIGUSR1 (pre-emption), `fit` saves a checkpoint and stops.

    This happens at the end of the current optimizer step. If validation is running or comes next,
    the checkpoint is saved at once, and the run stops after validation. It then raises
    `StoppedBySignal`, which carries the exit code. A second signal, at least a second later, stops
    at once.

    With several processes, a signal to one of them is enough: they agree after every step.

    Args:
        path: path of the checkpoint; `last.ckpt` beside the others is a good choice.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._received = 0
        self._agreed = 0
        self._once = Once()
        self._training = False
        self._process = 0
        self._speaks = True
        self._before: dict[int, Any] = {}
        self._installed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._speaks = trainer.is_global_zero
            self._received = self._agreed = 0
            self._once.forget()
            self._install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Again: Lightning has just set its own, with which SIGTERM would end with exit code 0.
        self._install()
        self._training = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if private.is_accumulating(trainer) or not self._has_signal(trainer):
            return
        trainer.save_checkpoint(self.path)
        if not private.epoch_ends(trainer) and not private.validation_is_next(trainer):
            self._stop(self._agreed)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_signal(trainer):
            trainer.save_checkpoint(self.path)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed:  # saved at the epoch's end, whose metrics are written now
            self._stop(self._agreed)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = self._agreed
        if self._has_signal(trainer):
            if not saved:
                trainer.save_checkpoint(self.path)
            self._stop(self._agreed)
        self._restore()

    def _install(self) -> None:
        self._process = os.getpid()
        before = handle(self._receive)
        if before and not self._installed:
            self._before, self._installed = before, True
            atexit.register(_end_workers)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked with this handler
            if not private.is_data_worker():
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return  # a terminal signals all, and the last step needs the workers
        if not self._installed:  # Lightning, when it ends, restores the handlers it found
            signal.signal(signum, self._before[signum] or signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if not self._once.is_new():
            return
        if self._received or not self._training:
            self._stop(signum)
        self._received = signum
        # no print: the signal may have interrupted one
        if self._speaks:
            os.write(2, f"\n{signal.Signals(signum).name}: stopping after this step\n".encode())

    def _has_signal(self, trainer: Trainer) -> bool:
        """Whether any process has received a signal; the same answer in all of them."""
        self._agreed = self._received
        if trainer.world_size > 1 and dist.is_initialized():
            signum = torch.tensor(self._received, device=trainer.strategy.root_device)
            dist.all_reduce(signum, dist.ReduceOp.MAX)
            self._agreed = int(signum)
        return bool(self._agreed)

    def _stop(self, signum: int) -> NoReturn:
        self._restore()
        raise StoppedBySignal(signum)

    def _restore(self, *args: Any, **kwargs: Any) -> None:
        if self._installed:
            put_back(self._before)
        self._installed = self._training = False

    on_exception: Any = _restore
    teardown: Any = _restore


def outlast_signals(worker: int) -> None:
    """Ignore signals in the workers of a `DataLoader`, as its `worker_init_fn`.

    Batch systems send SIGTERM to all processes of a job. Without this the workers end at once, and
    torch aborts the step that was to be finished. A batch that a worker cannot send, as with a full
    `/dev/shm`, is an error; without this the loader would wait for it.
    """
    handle(signal.SIG_IGN)
    private.report_lost_batches()


@functools.cache
def fork_apart() -> None:
    """Wait a moment before every fork from now on, for threads of gloo that are about to start.

    CPython 3.11 does not renew its list of threads in the child: a child that is forked while a
    thread of another library enters Python, as gloo's do after a barrier, waits forever.
    """
    os.register_at_fork(before=lambda: time.sleep(0.02))


def _end_workers() -> None:
    """Kill data workers before Python waits for them at its end.

    SIGTERM does not end workers that ignore it, nor one that was forked while another thread held
    Python's list of threads and hangs before it can run any handler (CPython 3.11, with gloo).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker ends
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
