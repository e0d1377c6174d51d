"""Measurements of training: figures of steps, samples per second, cost."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from attnkit.core.arguments import at_least
from attnkit.core.operators.multiply_adds import count_multiply_adds
from attnkit.lightning._private import leaves, log_again


def num_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch. For PyG's graphs it is the number of nodes,
    or of graphs where `y` has an entry for each graph; for a list of images, their number."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], list):
        return len(batch[0])
    for leaf in leaves(batch):
        if isinstance(nodes := getattr(leaf, "num_nodes", None), int):
            y, ptr = getattr(leaf, "y", None), getattr(leaf, "ptr", None)
            if y is not None and ptr is not None and len(y) == len(ptr) - 1:
                return len(y)
            return nodes
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return len(leaf)
    raise ValueError(f"batch: found no tensor with a batch dimension in a {type(batch).__name__}")


def wait_for_device(pl_module: LightningModule) -> None:
    """Wait until a GPU has finished, so that a clock measures its work."""
    if pl_module.device.type != "cpu":
        torch.accelerator.synchronize(pl_module.device)


class Laps:
    """A stopwatch: `lap` returns the seconds since the previous lap, or since `start`."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Start to count; it takes any arguments, so that it can be a callback's hook."""
        self.last = time.perf_counter()

    def lap(self, pl_module: LightningModule | None = None) -> float:
        """Return the seconds and start anew; with a module, wait for its GPU's work first."""
        if pl_module is not None:
            wait_for_device(pl_module)
        before, self.last = self.last, time.perf_counter()
        return self.last - before


@dataclass
class _Count:
    samples: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.samples / self.seconds if self.samples else math.nan


class Meter(Callback):
    """Measures training in three ways, each of which can be left out.

    `steps` logs four figures to all loggers of the trainer, every `log_every_n_steps`:

    - `step/loss`: the loss that is minimised, the mean over the batches since the last figures;
    - `step/lr`: the learning rate of the step, the highest of several groups;
    - `step/grad_norm`: the L2 norm of all gradients of the step, before they are clipped;
    - `step/samples_per_second`: throughput of training alone, data included; nodes of a graph.

    Loss and throughput are those of all processes. Between two logged steps nothing is read from
    the device: the loss is summed there. The figures are not metrics of the trainer, so no callback
    can monitor or report them. The last ones are in `figures`.

    `throughput` logs the metric `train/samples_per_second` after every epoch, summed over all
    ranks. The time is that of the training loop, with waiting for data and without validation. The
    metric is NaN for an epoch that has only skipped batches.

    `cost` measures what a model costs, for `results`, which `ResultsFile` writes:

    - `parameters` of the module;
    - `multiply_adds` of one forward pass on the module's `example_input_array`, if it has one
      (see `attnkit.count_multiply_adds`);
    - `step_seconds`, the median time from the end of a training step to the end of the next, which
      includes its data, forward, backward and optimizer.

    Args:
        steps, throughput, cost: what to measure.
        skip_batches: number of batches at the start of a training whose samples and time are not
            counted, while kernels are compiled and workers start.
        num_samples: returns the number of samples of a batch; by default the length of its first
            tensor, or the nodes of its graph.
    """

    def __init__(
        self,
        *,
        steps: bool = True,
        throughput: bool = True,
        cost: bool = True,
        skip_batches: int = 1,
        num_samples: Callable[[Any], int] = num_samples,
    ) -> None:
        at_least(0, skip_batches=skip_batches)
        self.steps, self.throughput, self.cost = steps, throughput, cost
        self.skip_batches = skip_batches
        self.num_samples = num_samples
        self.figures: dict[str, float] = {}
        self.results: dict[str, float] = {}
        self._laps = Laps()
        self._seen_batches = 0
        self._epoch, self._window = _Count(), _Count()
        """Counts since the epoch began, and since figures were logged; without skipped batches."""
        self._seconds: list[float] = []
        """Seconds of steps that follow another, with nothing else between them."""
        self._follows = False
        self._step = 0  # global step at the end of the last batch
        self._loss: Tensor | float = 0.0
        self._batches = 0  # whose losses are summed
        self._of_step: dict[str, Any] = {}

    # --- the clock ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._seen_batches = 0
        self._laps.start()
        self._clear()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = _Count()
        self.on_validation_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._laps.lap(pl_module)
        self._follows = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count(0, self._laps.lap(pl_module))

    def _count(self, samples: int, seconds: float) -> None:
        for count in (self._epoch, self._window):
            count.samples += samples
            count.seconds += seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_due = self._is_due(trainer, trainer.global_step)
        seconds = self._laps.lap(pl_module if is_due else None)
        if self._follows:
            self._seconds.append(seconds)
        self._follows = self.cost
        self._seen_batches += 1
        if self._seen_batches == self.skip_batches:
            self._laps.lap(pl_module)
            self._epoch, self._window = _Count(), _Count()
        elif self._seen_batches > self.skip_batches and (self.steps or self.throughput):
            self._count(self.num_samples(batch), seconds)
        self._note_loss(trainer, pl_module, outputs)
        if is_due:
            self._log(trainer)
        self._step = trainer.global_step

    # --- steps ---

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._is_due(trainer, trainer.global_step + 1):
            lr = max(float(group["lr"]) for group in optimizer.param_groups)
            self._of_step = {"lr": lr, "grad_norm": _gradient_norm(trainer, optimizer)}

    def _note_loss(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.steps and isinstance(loss, Tensor):
            if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
            self._loss = self._loss + loss.detach().float().mean()
            self._batches += 1

    def _is_due(self, trainer: Trainer, step: int) -> bool:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.steps and every > 0 and step // every > self._step // every

    def _log(self, trainer: Trainer) -> None:
        loss = torch.as_tensor(self._loss).double().cpu()
        means = torch.stack([loss / max(self._batches, 1), loss.new_tensor(self._window.rate)])
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
        self._loss, self._batches, self._of_step = 0.0, 0, {}
        # the time of logging counts in the next lap, and not in the next window
        self._window = _Count(seconds=self._laps.last - time.perf_counter())

    # --- epochs and the whole training ---

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count(0, self._laps.lap(pl_module))
        if self.throughput:
            # Every rank logs; otherwise the sum over ranks would wait for a missing one.
            name = "train/samples_per_second"
            value = torch.tensor(self._epoch.rate, device=pl_module.device)
            if not log_again(pl_module, name, value):
                pl_module.log(name, value, reduce_fx="sum", sync_dist=trainer.world_size > 1)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.cost:
            return
        self.results["parameters"] = sum(p.numel() for p in pl_module.parameters())
        example = pl_module.example_input_array
        if example is not None:
            inputs = move_data_to_device(example, pl_module.device)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            self.results["multiply_adds"] = count_multiply_adds(pl_module, *inputs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._seconds:
            self.results["step_seconds"] = statistics.median(self._seconds)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds} if self.cost else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds = list(state_dict["seconds"])


class StepMetrics(Meter):
    """A `Meter` of the figures of steps alone."""

    def __init__(self, num_samples: Callable[[Any], int] = num_samples) -> None:
        super().__init__(throughput=False, cost=False, num_samples=num_samples)


class Throughput(Meter):
    """A `Meter` of `train/samples_per_second` alone."""

    def __init__(
        self, skip_batches: int = 1, num_samples: Callable[[Any], int] = num_samples
    ) -> None:
        super().__init__(
            steps=False, cost=False, skip_batches=skip_batches, num_samples=num_samples
        )


class Cost(Meter):
    """A `Meter` of parameters, multiply-adds and the seconds of a step alone."""

    def __init__(self) -> None:
        super().__init__(steps=False, throughput=False)


def last_figures(trainer: Trainer) -> dict[str, float] | None:
    """Return the last logged figures of steps; None if no callback logs them."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c.figures for c in callbacks if isinstance(c, Meter) and c.steps), None)


def measured(trainer: Trainer) -> dict[str, float]:
    """Return the last logged metrics, and the numbers in the attribute `results` of callbacks.

    Values that are not finite are left out with a warning, since JSON has no such numbers.
    """
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        found |= getattr(callback, "results", {})
    for name in [name for name, value in found.items() if not math.isfinite(value)]:
        rank_zero_warn(f"{name} is {found.pop(name)} and left out of the results")
    return found


def _gradient_norm(trainer: Trainer, optimizer: Optimizer) -> Tensor:
    """Return the L2 norm of all gradients, before they are clipped."""
    given = [p.grad for group in optimizer.param_groups for p in group["params"]]
    found = [g.coalesce().values() if g.is_sparse else g for g in given if g is not None]
    norm = torch.nn.utils.get_total_norm(found) if found else torch.tensor(0.0)
    if isinstance(norm, DTensor):  # its parts are on several devices
        return norm.full_tensor()
    if isinstance(trainer.strategy, FSDPStrategy):  # each process has a part
        return trainer.strategy.reduce(norm.square(), reduce_op="sum").sqrt()
    return norm
