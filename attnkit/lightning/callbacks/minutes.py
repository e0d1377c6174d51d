"""A training of a given time: measured steps decide the number of epochs, and schedules follow."""

import math
from time import monotonic
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from attnkit.core.arguments import positive
from attnkit.lightning import _private as private
from attnkit.lightning.callbacks.meter import wait_for_device
from attnkit.lightning.console import say
from attnkit.lightning.modules.module import TaskModule

WARM_UP = 2  # batches that are not measured
LEAST = 8  # least number of measured batches
MEASURED = 0.02  # least share of the time that is spent before the decision
FORWARD = 1 / 3  # time of a validation batch over that of a training step, until it is measured
FEW = 6  # with fewer epochs than this, epochs are shortened to fit
PROVISIONAL = 100  # epochs of a trainer without max_epochs, until the decision
TOLERANCE = 0.05  # share of the time by which the end may move before the epochs change


class Minutes(Callback):
    """Makes a training take a given time, by the number of its epochs.

    Once some batches are measured (at least ten, and 2 % of the time), the number of epochs is
    decided, E = minutes / (b · s + v), with b batches of s seconds in an epoch and v seconds of
    validation. If that is fewer than six, an epoch has fewer batches, so that the last one ends in
    time with its validation. For data without a length, whole epochs are measured, and the first is
    ended when it takes all the time. The learning-rate schedule is made anew for these epochs, so
    that warm-up and decay end with them; until then it is that of the trainer's `max_epochs`.
    After an epoch, E is computed again if training would end more than 5 % of the time too early or
    too late; the number of batches stays.

    The time is that of training: with validation and checkpoints, without reading the data before
    it and the test after it. Checkpoints hold the decision and the time that was used: a resumed
    run continues as it would have, and with other minutes computes its epochs again. The first of
    several processes decides for all. `max_steps` of the trainer stays an upper bound.

    Args:
        minutes: time of training in minutes, more than 0.

    Raises:
        ValueError: `minutes` is not positive.
    """

    def __init__(self, minutes: float) -> None:
        positive(minutes=minutes)
        self.seconds = 60.0 * minutes
        self.epochs: int | None = None
        """Number of epochs; None until it is decided."""
        self.batches: int | None = None
        """Number of batches of an epoch, if it is fewer than the data have."""
        self._epoch_seconds = math.inf
        self._used = 0.0  # seconds before this process
        self._began = self._epoch_began = self._measured_from = math.nan
        # numbers of batches; the last one includes those before a resume
        self._measured = self._of_epoch = self._in_epoch = 0
        self._done = 0  # epochs that ended in this process

    @property
    def used(self) -> float:
        """Seconds of training so far."""
        return self._used + (0.0 if math.isnan(self._began) else monotonic() - self._began)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # an earlier fit may have set them
            self.epochs = self.batches = None
            self._epoch_seconds, self._used = math.inf, 0.0
        if trainer.max_epochs in (None, -1):
            trainer.fit_loop.max_epochs = PROVISIONAL

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._measured, self._done = monotonic(), -WARM_UP, 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_began, self._of_epoch = monotonic(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._of_epoch += 1
        self._in_epoch = batch_idx + 1
        if self.epochs is not None or self._done:
            return
        wait_for_device(pl_module)
        now = monotonic()
        self._measured += 1
        if self._measured == 0:
            self._measured_from = now
        passed = now - self._measured_from
        enough = self._measured >= LEAST and passed >= MEASURED * self.seconds
        if self._of_first(trainer, enough) and not private.is_accumulating(trainer):
            self._decide(trainer, batch_idx + 1, passed / self._measured)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        full = trainer.num_training_batches
        if self._of_epoch == (full if math.isfinite(full) else self._in_epoch):
            # otherwise the run was resumed within this epoch
            seconds = monotonic() - self._epoch_began
            known = math.isfinite(self._epoch_seconds)
            self._epoch_seconds = (seconds + self._epoch_seconds) / 2 if known else seconds
        elif math.isinf(self._epoch_seconds):
            return
        self._done += 1
        done, epochs = trainer.current_epoch + 1, self.epochs
        left = self.seconds - self.used
        fitting = done + max(0, round(left / self._epoch_seconds))
        if epochs is None:  # epochs are shorter than the measurement
            measured = self.used >= MEASURED * self.seconds or done >= (trainer.max_epochs or 0)
            epochs = fitting if measured else None
        elif done < epochs:
            off = abs(left - (epochs - done) * self._epoch_seconds)
            if off > max(TOLERANCE * self.seconds, self._epoch_seconds / 2):
                epochs = fitting
        self._settle(trainer, epochs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._used, self._began = self.used, math.nan

    def _decide(self, trainer: Trainer, done: int, step: float) -> None:
        """Decide for the first time, after `done` batches of an epoch, of `step` seconds each."""
        full = trainer.num_training_batches
        if math.isinf(full):  # only the end of an epoch shows its length
            trainer.should_stop |= self._of_first(trainer, self.used >= self.seconds)
            return
        validation = FORWARD * step * sum(trainer.num_val_batches)
        validation /= trainer.check_val_every_n_epoch or 1
        total = trainer.current_epoch + (self.seconds - self.used + done * step) / (
            full * step + validation
        )
        epochs, batches = round(total), None
        if total < FEW and trainer.current_epoch == 0:
            epochs = max(1, math.ceil(total))
            seconds = (self.seconds - self.used + done * step) / epochs
            batches = max(done, round((seconds - validation) / step))
            batches = None if batches >= full else batches
        self._epoch_seconds = (batches or full) * step + validation
        self._settle(trainer, epochs, batches)

    def _settle(self, trainer: Trainer, epochs: int | None, batches: int | None = None) -> None:
        """Apply the count of the first process to the trainer and the schedules, and print it."""
        epochs, batches = self._of_first(trainer, (epochs, batches))
        if epochs is None or epochs == self.epochs:
            return
        first, self.epochs = self.epochs is None, epochs
        trainer.fit_loop.max_epochs = epochs
        if batches is not None:
            self.batches = trainer.limit_train_batches = batches
            private.set_num_batches(trainer, batches)
        _schedule_again(trainer)
        if trainer.is_global_zero:
            count = trainer.num_training_batches
            each = f" of {count:,} batches" if math.isfinite(count) else ""
            say(
                f"trainer.minutes={self.seconds / 60:g}: {epochs:,} epochs{each if first else ''}"
                f", {self._epoch_seconds:.3g} s each; the learning rate follows"
            )

    def _of_first(self, trainer: Trainer, mine: Any) -> Any:
        """Return the value of the first process."""
        return trainer.strategy.broadcast(mine) if trainer.world_size > 1 else mine

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "used": self.used,
            "epochs": self.epochs,
            "batches": self.batches,
            "epoch_seconds": self._epoch_seconds,
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the decision, before the schedule is made and the data begun."""
        saved = (checkpoint.get("callbacks") or {}).get(self.state_key)
        if trainer.state.fn != "fit" or saved is None:
            return
        self._used, self._epoch_seconds = saved["used"], saved["epoch_seconds"]
        self.epochs, self.batches = saved["epochs"], saved["batches"]
        if self.epochs is None:
            least = checkpoint["epoch"] + 2  # a partial epoch measures nothing
            trainer.fit_loop.max_epochs = max(trainer.max_epochs or PROVISIONAL, least)
            return
        if saved["seconds"] != self.seconds:
            more = (self.seconds - self._used) / self._epoch_seconds
            self.epochs = checkpoint["epoch"] + max(0, round(more))
        trainer.fit_loop.max_epochs = self.epochs
        if self.batches is not None:
            trainer.limit_train_batches = self.batches


def _schedule_again(trainer: Trainer) -> None:
    """Replace running schedules by those of the current number of steps, advanced equally far."""
    module = trainer.lightning_module
    for config in trainer.lr_scheduler_configs:
        before = config.scheduler
        if isinstance(before, ReduceLROnPlateau):
            continue
        if (
            getattr(type(module), "configure_optimizers", None)
            is not TaskModule.configure_optimizers
        ):
            rank_zero_warn(
                f"trainer.minutes: {type(module).__name__} makes its learning-rate schedule itself:"
                " it does not follow the number of epochs that was measured"
            )
            return
        for group in before.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        config.scheduler = cast("TaskModule", module).make_scheduler(before.optimizer)
        for _ in range(before.last_epoch):
            config.scheduler.step()
