"""A loss that is NaN or infinite ends the run, before it is in the weights."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from attnkit.lightning.errors import RunError


class FiniteLoss(Callback):
    """Stops `fit` at the step whose loss is NaN or infinite, before a checkpoint is written.

    On the CPU it stops before the backward pass. On a GPU, where reading the loss would make the
    CPU wait, it stops at the next step or before the next checkpoint.

    Raises:
        RunError: names the step, the epoch and the batch.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, str] | None = None

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._check()
        where = (
            f"step {trainer.global_step}, batch {trainer.fit_loop.epoch_loop.batch_idx} "
            f"of epoch {trainer.current_epoch + 1}"
        )
        if trainer.world_size > 1:
            where += f", rank {trainer.global_rank}"
        self._pending = (loss.detach(), where)
        if loss.device.type == "cpu":
            self._check()

    def _check(self, *args: Any, **kwargs: Any) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending[0].isfinite().all():
            loss, where = pending
            raise RunError(
                f"the loss is {loss.float().mean().item()} at {where}: stopped; "
                "the checkpoints before it are intact\n"
                "  a lower optimizer.lr, gradient clipping or precision=32 may help"
            )

    on_save_checkpoint: Any = _check
    on_train_end: Any = _check
