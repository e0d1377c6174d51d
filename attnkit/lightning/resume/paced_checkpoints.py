"""Checkpoints of epochs that take less time than a checkpoint, as on small graphs."""

import copy
import time
from collections import OrderedDict
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT

from attnkit.lightning import _private as private

HELD = 2**26  # bytes of a checkpoint that are held in memory at most
PLAIN = {str, int, float, bool, type(None)}


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
        self.every_seconds = _seconds(every_seconds)
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


class BestCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` that holds the best checkpoint in memory and writes it every few seconds.

    A checkpoint that would replace one of less than `every_seconds` ago is held in memory, and
    written when that has passed, before any other checkpoint, and when training ends, also by an
    error. What is on the disk is thus never behind what another checkpoint says is the best. Large
    checkpoints, and those of several processes, are written at once.

    Args:
        every_seconds: 0 writes every improvement.
        kwargs: Lightning's.
    """

    def __init__(self, every_seconds: float = 5.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every_seconds = _seconds(every_seconds)
        self._held: tuple[dict[str, Any], str] | None = None
        self._written = "", -float("inf")
        self._is_small: bool | None = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._is_recent():
            self._write(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._write(trainer)
        super().on_exception(trainer, pl_module, exception)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if filepath == self._written[0]:
            self._held = None  # what is held is replaced
        if filepath == self._written[0] and self._is_recent() and self._may_hold(trainer):
            checkpoint = private.dump(trainer, bool(self.save_weights_only))
            self._held = _copied(checkpoint), filepath
            private.note_saved(self, trainer.global_step, filepath)
        else:
            super()._save_checkpoint(trainer, filepath)
            self._written = filepath, time.monotonic()

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """Lightning's, whose `deepcopy` takes ten times as long."""
        found = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in trainer.callback_metrics.items()
        }
        for name, count in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            logged = found.get(name)
            found[name] = logged.int() if isinstance(logged, torch.Tensor) else torch.tensor(count)
        return found

    def _may_hold(self, trainer: Trainer) -> bool:
        if self._is_small is None:
            module = trainer.lightning_module
            size = sum(p.numel() * p.element_size() for p in module.parameters())
            self._is_small = 4 * size < HELD  # optimizers keep up to three times as much
        return self._is_small and trainer.world_size == 1

    def _is_recent(self) -> bool:
        return time.monotonic() - self._written[1] < self.every_seconds

    def _write(self, trainer: Trainer) -> None:
        if self._held is not None:
            (checkpoint, filepath), self._held = self._held, None
            trainer.strategy.save_checkpoint(checkpoint, filepath)
            self._written = filepath, time.monotonic()
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)


def _copied(value: Any) -> Any:
    """With tensors and containers of its own, in a fifth of the time of `copy.deepcopy`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return (value.detach() if value.requires_grad else value).clone()
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind in (tuple, OrderedDict):
        return kind(_copied(item) for item in (value.items() if kind is OrderedDict else value))
    return copy.deepcopy(value)


def _seconds(value: float) -> float:
    if value < 0:
        raise ValueError(f"every_seconds: expected at least 0, got {value}")
    return value
