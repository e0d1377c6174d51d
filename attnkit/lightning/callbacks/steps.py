"""What training does within an epoch: its loss, learning rate, gradient norm and throughput."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from attnkit.lightning.callbacks.throughput import num_samples, wait_for_device


class StepMetrics(Callback):
    """Logs four figures every `log_every_n_steps` of the trainer, to all its loggers:

    - `step/loss`: the loss that is minimised, the mean over the batches since the last time;
    - `step/lr`: the learning rate of the step, of several groups the highest;
    - `step/grad_norm`: the L2 norm of all gradients of the step, before they are clipped;
    - `step/samples_per_second`: of training alone, data included; nodes of a graph.

    Loss and throughput are those of all processes. Between two logged steps nothing is read from
    the device: the loss is summed there. The figures are not metrics of the trainer, so no callback
    can monitor or report them. The last ones are in `figures`.

    Args:
        num_samples: how many samples a batch has; by default the length of its first tensor,
            or the nodes of its graph.
    """

    def __init__(self, num_samples: Callable[[Any], int] = num_samples) -> None:
        self.num_samples = num_samples
        self.figures: dict[str, float] = {}
        self._step = 0  # at the end of the last batch
        self._loss: Tensor | float = 0.0
        self._batches = 0
        self._samples = 0
        self._seconds = 0.0
        self._since: float | None = None  # while the clock runs
        self._warm = False  # after the first batch, in which kernels are compiled
        self._of_step: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._clear()
        self._since, self._warm = None, False

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._is_due(trainer, trainer.global_step + 1):
            lr = max(float(group["lr"]) for group in optimizer.param_groups)
            self._of_step = {"lr": lr, "grad_norm": _gradient_norm(trainer, optimizer)}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
            self._loss = self._loss + loss.detach().float().mean()
            self._batches += 1
        if self._warm:
            self._samples += self.num_samples(batch)
        else:
            self._since, self._warm = time.perf_counter(), True
        if self._is_due(trainer, trainer.global_step):
            self._log(trainer)
        self._step = trainer.global_step

    def _is_due(self, trainer: Trainer, step: int) -> bool:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and step // every > self._step // every

    def _log(self, trainer: Trainer) -> None:
        loss = torch.as_tensor(self._loss).double().cpu()  # here the device is waited for
        self._stop()
        rate = self._samples / self._seconds if self._samples else math.nan
        means = torch.stack([loss / max(self._batches, 1), loss.new_tensor(rate)])
        if trainer.world_size > 1:
            device = trainer.strategy.root_device
            means = trainer.strategy.reduce(means.float().to(device), reduce_op="mean")
        mean_loss, mean_rate = means.tolist()
        found = {"loss": mean_loss if self._batches else math.nan, **self._of_step}
        found["samples_per_second"] = mean_rate * trainer.world_size
        numbers = {name: float(value) for name, value in found.items()}
        self.figures = {name: value for name, value in numbers.items() if not math.isnan(value)}
        if trainer.is_global_zero:
            logged = {f"step/{name}": value for name, value in self.figures.items()}
            for logger in trainer.loggers:
                logger.log_metrics({**logged, "epoch": trainer.current_epoch}, trainer.global_step)
        self._clear()

    def _clear(self) -> None:
        self._loss, self._batches, self._samples, self._seconds = 0.0, 0, 0, 0.0
        self._of_step = {}
        self._since = time.perf_counter()

    def _stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def _pause(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wait_for_device(pl_module)
        self._stop()

    def _go_on(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._warm:
            self._since = time.perf_counter()

    on_validation_start: Any = _pause
    on_validation_end: Any = _go_on
    on_train_epoch_end: Any = _pause
    on_train_epoch_start: Any = _go_on


def _gradient_norm(trainer: Trainer, optimizer: Optimizer) -> Tensor:
    """Of all gradients, as they are before they are clipped."""
    given = [p.grad for group in optimizer.param_groups for p in group["params"]]
    found = [g.coalesce().values() if g.is_sparse else g for g in given if g is not None]
    norm = torch.nn.utils.get_total_norm(found) if found else torch.tensor(0.0)
    if isinstance(norm, DTensor):  # of parts on several devices
        return norm.full_tensor()
    if isinstance(trainer.strategy, FSDPStrategy):  # each process has a part
        return trainer.strategy.reduce(norm.square(), reduce_op="sum").sqrt()
    return norm
