"""`run=bench`: how fast this model trains on this machine, where the time goes, and which
attention kernel wins. No callback and no logger of attnkit's runs beside it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from attnkit.launch.job.run import Run
from attnkit.launch.measure.kernels import compare_kernels
from attnkit.launch.measure.step import step_of
from attnkit.lightning.callbacks.throughput import num_samples, wait_for_device
from attnkit.lightning.errors import UserError

FILE = "bench.md"
WARM_UP = 3  # steps
SECONDS = 5.0  # of timed steps
LEAST = 5  # steps


class Clock(SimpleProfiler):
    """Lightning's profiler of durations, which waits for the GPU."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self._module = module

    def start(self, action_name: str) -> None:
        wait_for_device(self._module)
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        wait_for_device(self._module)
        super().stop(action_name)

    def usual(self, *endings: str) -> float:
        """Median seconds of the actions whose names end like this, all together."""
        recorded = self.recorded_durations.items()
        return sum(statistics.median(v) for name, v in recorded if v and name.endswith(endings))

    def summary(self) -> str:
        """Nothing: the figures are in the tables."""
        return ""


class _Timed(Callback):
    """Counts what comes after the warm-up, and ends training after some seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: list[float] = []
        self.units: Counter[str] = Counter()
        self.batch: Any = None
        self._steps = 0
        self._last = 0.0

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wait_for_device(pl_module)
        before, self._last = self._last, time.perf_counter()
        self._steps += 1
        if self._steps <= WARM_UP:
            self.batch = batch
            self.clock.recorded_durations.clear()
        else:
            self.seconds.append(self._last - before)
            self.units.update(units(batch))
            trainer.should_stop = sum(self.seconds) > SECONDS and len(self.seconds) >= LEAST


def units(batch: Any) -> dict[str, int]:
    """The unit in which a batch is counted: images, words, nodes or samples."""
    if hasattr(batch, "edge_index"):
        return {"nodes": num_samples(batch)}
    counts = {}
    image = batch.get("image") if isinstance(batch, Mapping) else None
    if image is None and isinstance(batch, list | tuple) and batch:
        image = batch[0]
    if isinstance(image, Tensor) and image.ndim == 4:
        counts["images"] = len(image)
    if isinstance(batch, Mapping) and isinstance(batch.get("words"), Tensor):
        counts["words"] = int((batch["words"] != 0).sum())  # 0 is padding
    return counts or {"samples": num_samples(batch)}


def work(run: Run) -> dict[str, float] | None:
    """Time steps of training and the kernels; leaves bench.md."""
    data = run.make_data()
    module = run.make_module()
    trainer = run.make_trainer()
    clock = trainer.profiler = Clock(module)  # type: ignore[attr-defined]
    if trainer.world_size > 1:
        raise UserError("run=bench: one process; trainer.devices=1 trainer.strategy=auto")
    if not run.ready():
        return None
    timed = _Timed(clock)
    trainer.callbacks.append(timed)  # type: ignore[attr-defined]
    trainer.limit_val_batches = 0
    trainer.fit_loop.min_epochs = 0
    trainer.fit_loop.max_epochs = 10_000  # the clock ends it
    trainer.fit(module, datamodule=data)
    if not timed.seconds:
        raise UserError(f"run=bench: needs more than {WARM_UP} steps; trainer.max_steps ends it")
    figures: dict[str, float] = {"batches": len(timed.seconds)}
    usual = statistics.median(timed.seconds)
    whole = usual * len(timed.seconds)  # what others do on the machine is no cost of the model's
    for name, count in timed.units.items():
        figures[f"train/{name}_per_second"] = count / whole
    figures |= _split(clock, usual)
    kernels = compare_kernels(module, step_of(trainer, module, timed.batch))
    figures |= {f"backend/{name}_seconds": found for name, (found, _) in kernels.items() if found}
    (run.folder / FILE).write_text(_markdown(figures, kernels), encoding="utf-8")
    return figures


def _split(clock: Clock, whole: float) -> dict[str, float]:
    """Median seconds of a step, by part. Lightning's optimizer step has forward and backward in it,
    and zeroing the gradients, which is counted as the optimizer's."""
    forward, backward = clock.usual(".training_step"), clock.usual(".backward")
    parts = {
        "data": clock.usual("train_dataloader_next", ".batch_to_device"),
        "forward": forward,
        "backward": backward,
        "optimizer": max(0.0, clock.usual(".optimizer_step") - forward - backward),
    }
    parts["other"] = max(0.0, whole - sum(parts.values()))
    return {**{f"step/{name}_seconds": s for name, s in parts.items()}, "step/seconds": whole}


def _markdown(figures: Mapping[str, float], kernels: Mapping[str, tuple[float | None, str]]) -> str:
    lines = ["| figure | value |", "|---|---|"]
    lines += [f"| {n} | {v:,.4g} |" for n, v in figures.items() if not n.startswith("backend/")]
    if kernels:
        lines += ["", "| kernel | forward + backward | to auto | |", "|---|---|---|---|"]
    auto = kernels.get("auto", (None, ""))[0]
    ranked = sorted(kernels.items(), key=lambda item: item[1][0] or float("inf"))
    for name, (seconds, why) in ranked:
        figure = f"{1000 * seconds:,.1f} ms" if seconds else ""
        ratio = f"{seconds / auto:.2f}" if seconds and auto else ""
        lines.append(f"| `{name}` | {figure} | {ratio} | {why} |")
    return "\n".join(lines) + "\n"
