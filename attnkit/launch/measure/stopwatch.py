"""A job cut short and timed: what its steps, epochs and test take, and so the whole of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loops import evaluation_loop, fit_loop

from attnkit.lightning.callbacks.throughput import wait_for_device

MOST = {"train": 24, "validate": 4, "test": 4}  # batches of an epoch, or of each loader
WARM_UP = 2  # steps not counted
ENOUGH = 5.0  # seconds, with two epochs begun
TOO_LONG = 30.0  # seconds, after which three steps suffice


class Stopwatch(Callback):
    """Stops training after a few seconds, and keeps the times; to be the last of the callbacks."""

    def __init__(self) -> None:
        self.full: dict[str, list[float]] = {stage: [] for stage in MOST}
        """Batches of each loader, as the whole job has them."""
        self.steps: list[float] = []
        self.batch: Any = None
        """The first of training."""
        self._seen = dict.fromkeys(MOST, 0)
        self._times: dict[str, list[float]] = {"validate": [], "test": []}
        self._overheads: list[float] = []
        self._epochs = 0
        self._started: float | None = None
        self._epoch_started: float | None = None
        self._last = self._in_batches = 0.0

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Inside, Lightning gets no more batches of a stage than `MOST`."""
        original = fit_loop._parse_num_batches

        def few(stage: Any, length: float, limit: float) -> float:
            count = original(stage, length, limit)
            self.full[stage.value].append(count)
            return min(count, MOST[stage.value])

        with ExitStack() as stack:
            for loop in (fit_loop, evaluation_loop):
                stack.enter_context(patch.object(loop, "_parse_num_batches", few))
            yield

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch()
        self._epochs += 1
        self._epoch_started = self._last = time.perf_counter()
        self._in_batches = 0.0
        if self._started is None:
            self._started = self._last

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.batch is None:
            self.batch = batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        wait_for_device(pl_module)
        now = time.perf_counter()
        self._seen["train"] += 1
        if self._seen["train"] > WARM_UP:
            self.steps.append(now - self._last)
        self._in_batches += now - self._last
        self._last = now
        elapsed = now - (self._started or 0.0)
        enough = elapsed > ENOUGH and self._epochs > 1
        if enough or (elapsed > TOO_LONG and len(self.steps) >= 3):
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch()

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if not trainer.sanity_checking:
            self._in_batches += self._evaluated("validate", pl_module)

    def on_test_start(self, *args: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._evaluated("test", pl_module)

    def seconds(self, trainer: Trainer, wall: float, config: dict[str, Any], world: int) -> float:
        """Of the whole job, of which this part took `wall`; infinite where it has no end.

        What is not an epoch's (imports, building, drawing) is the same in both.

        Args:
            config: `trainer` of the configuration, before it was cut.
            world: processes that share the batches.
        """
        batches = self.batches("train", world)
        epochs = self.epochs(trainer, batches, config)
        if math.isinf(epochs * batches):
            return math.inf
        known = self._step * self._seen["train"] + self._overhead * self._epochs
        known += _mean(self._times["validate"]) * self._seen["validate"]
        test = _mean(self._times["test"]) * (self.batches("test", world) - self._seen["test"])
        return wall - known + epochs * self.epoch_seconds(config, world) + test

    def epoch_seconds(self, config: dict[str, Any], world: int) -> float:
        """Of an epoch, its validation included; arguments as of `seconds`."""
        batches = self.batches("train", world)
        interval = config.get("val_check_interval") or 1.0
        within = 1 / interval if isinstance(interval, float) else batches / interval
        validations = max(1, within // 1) / (config.get("check_val_every_n_epoch") or 1)
        validation = _mean(self._times["validate"]) * self.batches("validate", world)
        return self._step * batches + self._overhead + validations * validation

    @property
    def _step(self) -> float:
        return statistics.fmean(self.steps or [0.0])

    @property
    def _overhead(self) -> float:
        """Of an epoch, beside its batches; the first has what comes once, too."""
        return statistics.fmean(self._overheads[1:] or self._overheads or [0.0])

    def epochs(self, trainer: Trainer, batches: float, config: dict[str, Any]) -> float:
        """As the configuration has them; the last may be a part of one."""
        given = config.get("max_epochs")
        steps = config.get("max_steps") or -1
        ends = [float(given)] if given is not None and given > 0 else []
        if steps > 0:
            ends.append(steps * trainer.accumulate_grad_batches / batches)
        if not ends and given is None and steps < 0:
            return 1000.0  # Lightning's own
        return min(ends, default=math.inf)

    def batches(self, stage: str, world: int = 1) -> float:
        """Of a stage in a process, once through."""
        counts = self.full[stage]
        if stage == "train":
            return math.ceil(max(counts, default=0) / world) if counts else 0
        total = sum(counts)
        return total if math.isinf(total) else math.ceil(total / world)

    def _evaluated(self, stage: str, pl_module: LightningModule) -> float:
        wait_for_device(pl_module)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._times[stage].append(seconds)
        self._seen[stage] += 1
        return seconds

    def _end_epoch(self) -> None:
        if self._epoch_started is not None:
            whole = time.perf_counter() - self._epoch_started
            self._overheads.append(max(0.0, whole - self._in_batches))
            self._epoch_started = None


def _mean(seconds: list[float]) -> float:
    """The first is a warm-up, where there are others."""
    return statistics.fmean(seconds[1:] or seconds or [0.0])
