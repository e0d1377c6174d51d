"""Checkpoints of epochs that take less time than a checkpoint, as on small graphs."""

import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` that saves the run after an epoch, at most once every few seconds.

    It saves at the end of the last epoch, and of others where it is `every_seconds` since it last
    did. A run that is killed repeats these seconds; Ctrl-C and SIGTERM save by `SaveOnSignal`.

    Args:
        every_seconds: 0 saves after every epoch.
        kwargs: Lightning's.
    """

    def __init__(self, every_seconds: float = 5.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every_seconds = checked_seconds(every_seconds)
        self._saved_at = -float("inf")

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
