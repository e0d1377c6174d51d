"""Checks and weights of the loss: it must be finite, and each of its samples counts the same."""

from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from attnkit.lightning.callbacks.meter import num_samples
from attnkit.lightning.errors import RunError


class FiniteLoss(Callback):
    """Stops `fit` at the step whose loss is NaN or infinite, before a checkpoint is written.

    On the CPU it stops before the backward pass. On a GPU, where reading the loss would make the
    CPU wait, it stops at the next step or before the next checkpoint.

    Raises:
        RunError: names the step, the epoch and the batch of the loss.
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


class ExactAccumulation(Callback):
    """Makes accumulated batches equal to one large batch, for losses that are means.

    For A batches of n_i samples with mean losses m_i, Lightning minimises Σ m_i / A, even in the
    last step of an epoch, which may have fewer or smaller batches. With this callback the loss is
    Σ n_i m_i / Σ n_i, which is the same if all batches are full. It does nothing for A = 1 and for
    modules that step themselves. Gradients are scaled before they are clipped.

    Args:
        num_samples: returns the number of samples of a batch; by default the length of its first
            tensor, or the nodes of its graph.
    """

    def __init__(self, num_samples: Callable[[Any], int] = num_samples) -> None:
        self.num_samples = num_samples
        self._sizes: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sizes = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
            self._sizes.append(self.num_samples(batch))

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        # relative to the first batch, as the sum is not known before the last
        if self._sizes and self._sizes[-1] != self._sizes[0]:
            loss.mul_(self._sizes[-1] / self._sizes[0])

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        sizes, self._sizes = self._sizes, []
        if not sizes:
            return
        factor = trainer.accumulate_grad_batches * sizes[0] / sum(sizes)
        if factor != 1:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
