"""Checkpoints of epochs that take less time than a checkpoint, as on small graphs."""

import os
import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from attnkit.lightning import _private as private


class LastCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` that saves the run after an epoch, at most once every few seconds.

    It saves at the end of the last epoch, and of others where it is `every_seconds` since it last
    did. A run that is killed repeats these seconds; Ctrl-C and SIGTERM save by `SaveOnSignal`. It
    saves too where `max_steps`, `max_time` or a callback ends the training within an epoch, so that
    it can go on from there.

    Args:
        every_seconds: 0 saves after every epoch.
        kwargs: Lightning's.
    """

    def __init__(self, every_seconds: float = 5.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every_seconds = checked_seconds(every_seconds)
        self._saved_at = -float("inf")
        self._is_within_epoch = False

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if (
            private.stops_now(trainer)
            and not private.epoch_ends(trainer)
            and not private.is_accumulating(trainer)
            and not self._should_skip_saving_checkpoint(trainer)
        ):
            # not at the end of the epoch, which would count as trained; Lightning then saves no
            # more at this step
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self._is_within_epoch = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._is_within_epoch and trainer.is_global_zero:
            os.utime(self.best_model_path)  # the one to go on from, of those of this step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due(trainer):
            super().on_validation_end(trainer, pl_module)

    def _is_due(self, trainer: Trainer) -> bool:
        """The same in all processes."""
        steps, epochs = trainer.max_steps, trainer.max_epochs
        if (
            trainer.should_stop
            or 0 <= steps <= trainer.global_step
            or (epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
        ):
            return True
        is_due = time.monotonic() - self._saved_at >= self.every_seconds
        return trainer.strategy.broadcast(is_due) if trainer.world_size > 1 else is_due

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._saved_at = time.monotonic()


def checked_seconds(value: float) -> float:
    """`every_seconds`, which must not be negative."""
    if value < 0:
        raise ValueError(f"every_seconds: expected at least 0, got {value}")
    return value
