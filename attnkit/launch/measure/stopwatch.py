"""Times a shortened job: its steps, epochs and test, from which the whole is estimated."""

from __future__ import annotations

import math
from functools import partialmethod
from itertools import pairwise
from statistics import fmean
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

from attnkit.lightning.callbacks.meter import Laps

MOST = {"train": 24, "val": 4, "test": 4}  # batches of an epoch, or of each loader
WARM_UP = {"train": 2, "val": 1, "test": 1}  # batches not counted
ENOUGH = 5.0  # seconds, with two epochs begun
TOO_LONG = 30.0  # seconds, after which three steps suffice


class Stopwatch(Callback):
    """Times a job of a few batches, which it ends after some seconds; the last of the callbacks.

    The whole job takes what this part took, for each step, validation and test batch that was left
    out the mean of those measured, and for each epoch left out what an epoch took beside them.

    Args:
        trainer: of the job, which gets no more batches of a stage than `MOST`.
        given: the `trainer` of its configuration.
        world: processes that share the batches of the whole job.
    """

    def __init__(self, trainer: Trainer, given: dict[str, Any], world: int = 1) -> None:
        self.accumulated, self.given, self.world = trainer.accumulate_grad_batches, given, world
        self._ends = trainer.max_epochs, trainer.max_steps
        self.times: dict[str, list[float]] = {stage: [] for stage in MOST}
        self.batch: Any = None
        """The last of training."""
        self._laps = Laps()
        self._epochs: list[tuple[float, float]] = []
        """When each began, and the last one ended; the seconds of batches until then."""
        self._counts: dict[str, list[float]] = {stage: [] for stage in MOST}
        self._limits = {stage: getattr(trainer, f"limit_{stage}_batches") for stage in MOST}
        for stage, limit in self._limits.items():
            few = MOST[stage] if isinstance(limit, float) else min(MOST[stage], limit)
            setattr(trainer, f"limit_{stage}_batches", few if limit else 0)
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None

    # --- measuring ---

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._laps.start()
        self._epochs.append((self._laps.last, sum(self.times["train"]) + sum(self.times["val"])))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note("train", trainer, pl_module)
        self.batch = batch
        elapsed = self._laps.last - self._epochs[0][0]
        enough = elapsed > ENOUGH and len(self._epochs) > 1
        if enough or (elapsed > TOO_LONG and len(self.times["train"]) >= WARM_UP["train"] + 3):
            trainer.should_stop = True

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._laps.start()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start()
        self._count("train", trainer.train_dataloader)
        self._count("val", trainer.val_dataloaders)

    on_test_start = on_validation_start

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count("test", trainer.test_dataloaders)

    def _note(self, stage: str, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.times[stage].append(self._laps.lap(pl_module))

    on_validation_batch_end = partialmethod(_note, "val")
    on_test_batch_end = partialmethod(_note, "test")

    def _count(self, stage: str, loaders: Any) -> None:
        """The batches of each loader, as the whole job has them."""
        limit = self._limits[stage]
        for loader in CombinedLoader(loaders or []).flattened:
            length = math.inf if (known := sized_len(loader)) is None else known
            cut = length * limit if isinstance(limit, float) else min(length, limit)
            self._counts[stage].append(int(cut) if math.isfinite(cut) else cut)

    # --- the whole job ---

    def seconds(self, wall: float) -> float:
        """Seconds of the whole job, if this part took `wall`; infinite if the job has no end."""
        test = self.mean("test") * (self.batches("test") - len(self.times["test"]))
        measured = self._epochs[-1][0] - self._epochs[0][0]
        return wall - measured + self.epochs() * self.epoch_seconds() + test

    def epoch_seconds(self) -> float:
        """Of an epoch, with its validation."""
        batches = self.batches("train")
        interval = self.given.get("val_check_interval") or 1.0
        within = 1 / interval if isinstance(interval, float) else batches / interval
        validations = max(1, within // 1) / (self.given.get("check_val_every_n_epoch") or 1)
        pairs = pairwise(self._epochs)
        beside = [end - begin - (after - before) for (begin, before), (end, after) in pairs]
        own = fmean(beside[1:] or beside or [0.0])  # the first has what comes once, too
        return (
            own
            + batches * self.mean("train")
            + validations * self.batches("val") * self.mean("val")
        )

    def mean(self, stage: str) -> float:
        """Seconds of a batch."""
        times = self.times[stage]
        return fmean(times[WARM_UP[stage] :] or times or [0.0])

    def epochs(self) -> float:
        """As the configuration has them; the last may be a part of one."""
        epochs, steps = (end if end and end > 0 else math.inf for end in self._ends)
        return min(epochs, steps * self.accumulated / (self.batches("train") or 1))

    def batches(self, stage: str) -> float:
        """Of a stage in each process, once through."""
        counts = self._counts[stage]
        # Of several loaders of training the shorter ones start again; others come in turn.
        count = max(counts, default=0) if stage == "train" else sum(counts)
        return math.ceil(count / self.world) if math.isfinite(count) else count
