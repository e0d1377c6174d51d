"""How many samples per second training goes through."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.lightning._private import leaves, log_again


def num_samples(batch: Any) -> int:
    """The length of the first tensor in a batch; of PyG's graphs, the number of nodes."""
    for leaf in leaves(batch):
        if isinstance(nodes := getattr(leaf, "num_nodes", None), int):
            return nodes
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return len(leaf)
    raise ValueError(f"batch: found no tensor with a batch dimension in a {type(batch).__name__}")


class Throughput(Callback):
    """Logs `train/samples_per_second` after every epoch, summed over all ranks.

    The time is that of the training loop, with waiting for data and without validation. It is
    NaN for an epoch that has only skipped batches.

    Args:
        skip_batches: batches at the start of a run that are not counted, while kernels are compiled
            and workers start.
        num_samples: how many samples a batch has; by default the length of its first tensor,
            or the nodes of its graph.
    """

    def __init__(
        self, skip_batches: int = 1, num_samples: Callable[[Any], int] = num_samples
    ) -> None:
        at_least(0, skip_batches=skip_batches)
        self.skip_batches = skip_batches
        self.num_samples = num_samples
        self._seen_batches = 0
        self._samples = 0
        self._seconds = 0.0
        self._started = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen_batches += 1
        if self._seen_batches == self.skip_batches:
            self._begin(trainer, pl_module)
        elif self._seen_batches > self.skip_batches:
            self._samples += self.num_samples(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(trainer, pl_module)
        # Every rank logs, or the sum over ranks would wait for one that does not.
        rate = self._samples / self._seconds if self._samples else math.nan
        name, value = "train/samples_per_second", torch.tensor(rate, device=pl_module.device)
        if not log_again(pl_module, name, value):
            pl_module.log(name, value, reduce_fx="sum", sync_dist=trainer.world_size > 1)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wait_for_device(pl_module)
        self._samples, self._seconds = 0, 0.0
        self._started = time.perf_counter()

    def _pause(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wait_for_device(pl_module)
        self._seconds += time.perf_counter() - self._started
        self._started = time.perf_counter()

    on_train_epoch_start: Any = _begin
    on_validation_start: Any = _pause


def wait_for_device(pl_module: LightningModule) -> None:
    """Wait until a GPU has finished, so that a clock measures its work."""
    if pl_module.device.type != "cpu":
        torch.accelerator.synchronize(pl_module.device)
