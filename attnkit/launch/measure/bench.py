"""`run=bench`: how fast this model trains and predicts on this machine, where the time goes, and
which attention kernel wins. Nothing of attnkit's runs beside it: no callbacks, no loggers."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor
from torch.utils.benchmark import Timer

from attnkit.core.decode_step import plain_linear
from attnkit.core.watch.multiply_adds import count_multiply_adds
from attnkit.launch.job.session import Session
from attnkit.launch.measure.kernels import compare_kernels
from attnkit.launch.measure.step import step_of
from attnkit.lightning.callbacks.throughput import num_samples, wait_for_device
from attnkit.lightning.errors import UserError, first_line

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
    """What a batch has so many of: images, words, nodes, or samples."""
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


def work(session: Session) -> dict[str, float] | None:
    """Time steps of training and the kernels; leaves bench.md."""
    data = session.make_data()
    module = session.make_module()
    trainer = session.make_trainer()
    trainer.profiler = Clock(module)  # type: ignore[attr-defined]
    if trainer.world_size > 1:
        raise UserError("run=bench: one process; trainer.devices=1 trainer.strategy=auto")
    if not session.begin():
        return None
    figures, table = bench(trainer, module, data)
    (session.folder / FILE).write_text(table, encoding="utf-8")
    return figures


def bench(
    trainer: Trainer, module: LightningModule, data: LightningDataModule
) -> tuple[dict[str, float], str]:
    """The figures, flat, and all of them as Markdown tables."""
    clock = trainer.profiler  # type: ignore[attr-defined]
    timed = _Timed(clock)
    trainer.callbacks.append(timed)  # type: ignore[attr-defined]
    trainer.limit_val_batches = 0
    trainer.fit_loop.min_epochs = 0
    if (trainer.fit_loop.max_epochs or -1) > 0:  # the clock ends it
        trainer.fit_loop.max_epochs = max(trainer.fit_loop.max_epochs or 0, 10_000)
    trainer.fit(module, datamodule=data)
    if not timed.seconds:
        raise UserError(f"run=bench: needs more than {WARM_UP} steps; trainer.max_steps ends it")
    figures: dict[str, float] = {"batches": len(timed.seconds)}
    usual = statistics.median(timed.seconds)
    whole = usual * len(timed.seconds)  # what others do on the machine is no cost of the model's
    for name, count in timed.units.items():
        figures[f"train/{name}_per_second"] = count / whole
    figures |= _split(clock, usual)
    missing: dict[str, str] = {}
    try:
        figures |= _prediction(trainer, module, data, clock)
    except Exception as error:  # not every module predicts from the batches of validation
        missing["predict/…_per_second"] = first_line(error, named=True)
    step = step_of(trainer, module, timed.batch)
    precision = str(trainer.precision).partition("-")[0]
    dtype = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    peak = peak_multiply_adds(module.device, dtype.get(precision, torch.float32))
    figures["peak_multiply_adds_per_second"] = peak
    try:
        # a backward has two products for each one of the forward
        done = 3 * count_multiply_adds(step) * len(timed.seconds)
        figures["train/share_of_peak"] = done / whole / peak
    except Exception as error:  # a step of somebody's own, outside of training
        missing["train/share_of_peak"] = first_line(error, named=True)
    kernels = compare_kernels(module, step)
    figures |= {f"backend/{name}_seconds": found for name, (found, _) in kernels.items() if found}
    return figures, _markdown(figures, missing, kernels)


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


def _prediction(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, clock: Clock
) -> dict[str, float]:
    """Of `predict_step` on the batches of validation, data included."""
    loader = data.val_dataloader()
    counts = [Counter(units(batch)) for batch in islice(loader, LEAST)]
    trainer.limit_predict_batches = LEAST
    for _ in range(2):  # the first warms up
        clock.recorded_durations.clear()
        trainer.predict(module, dataloaders=loader, return_predictions=False)
    whole = len(counts) * clock.usual("predict_next", ".predict_step", ".batch_to_device")
    total = sum(counts, Counter[str]())
    return {f"predict/{name}_per_second": count / whole for name, count in total.items()}


def peak_multiply_adds(device: torch.device, dtype: torch.dtype) -> float:
    """Multiply-adds per second of the best of some products of square matrices, in this process:
    by torch's `@`, or by the library that attnkit's layers take in prediction."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    names = {"a": a, "b": b, "linear": plain_linear}
    with torch.no_grad():
        timers = [
            Timer(product, globals=names, num_threads=torch.get_num_threads())
            for product in ("a @ b", "linear(a, b, None)")
        ]
        return size**3 / min(timer.timeit(1).median for timer in 3 * timers)


def _markdown(
    figures: Mapping[str, float],
    missing: Mapping[str, str],
    kernels: Mapping[str, tuple[float | None, str]],
) -> str:
    lines = ["| figure | value |", "|---|---|"]
    lines += [f"| {n} | {v:,.4g} |" for n, v in figures.items() if not n.startswith("backend/")]
    lines += [f"| {name} | not known: {why} |" for name, why in missing.items()]
    if kernels:
        lines += ["", "| kernel | forward + backward | to auto | |", "|---|---|---|---|"]
    auto = kernels.get("auto", (None, ""))[0]
    ranked = sorted(kernels.items(), key=lambda item: item[1][0] or float("inf"))
    for name, (seconds, why) in ranked:
        figure = f"{1000 * seconds:,.1f} ms" if seconds else ""
        ratio = f"{seconds / auto:.2f}" if seconds and auto else ""
        lines.append(f"| `{name}` | {figure} | {ratio} | {why} |")
    return "\n".join(lines) + "\n"
