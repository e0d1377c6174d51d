"""Accumulated gradients in which every sample counts the same."""

from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from attnkit.lightning.callbacks.meter import num_samples


class ExactAccumulation(Callback):
    """Makes accumulated batches equal to one large batch, for losses that are means.

    For A batches of n_i samples with mean losses m_i, Lightning minimises Σ m_i / A, even in the
    last step of an epoch, which may have fewer or smaller batches. This minimises
    Σ n_i m_i / Σ n_i, which is the same if all batches are full. It does nothing for A = 1 and for
    modules that step themselves. Gradients are scaled before they are clipped.

    Args:
        num_samples: how many samples a batch has; by default the length of its first tensor, or
            the nodes of its graph.
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
