"""`run=bench`: how fast this model trains and predicts on this machine, where the time goes, and
which attention kernel wins. Nothing of attnkit's runs beside it: no callbacks, no loggers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from attnkit.core.backends import BACKENDS, UnsupportedError
from attnkit.core.multiply_adds import count_multiply_adds
from attnkit.core.products import plain_linear
from attnkit.launch.errors import is_out_of_memory
from attnkit.launch.job.session import Session
from attnkit.launch.measure.step import step_of
from attnkit.lightning.callbacks.throughput import num_samples, wait_for_device
from attnkit.lightning.errors import UserError, first_line

FILE = "bench.md"
WARM_UP = 3  # steps
SECONDS = 5.0  # of timed steps
LEAST = 5  # steps
ROUNDS = 5  # of the kernels


class Clock(SimpleProfiler):
    """Lightning's profiler of durations, which waits for the GPU."""

    module: LightningModule | None = None

    def start(self, action_name: str) -> None:
        self._wait()
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        self._wait()
        super().stop(action_name)

    def usual(self, *endings: str) -> float:
        """Median seconds of the actions whose names end like this, all together."""
        recorded = self.recorded_durations.items()
        return sum(statistics.median(v) for name, v in recorded if v and name.endswith(endings))

    def summary(self) -> str:
        """Nothing: the figures are what is wanted."""
        return ""

    def _wait(self) -> None:
        if self.module is not None:
            wait_for_device(self.module)


class _Timed(Callback):
    """Begins to count after the warm-up, and ends training after some seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: list[float] = []
        self.units: dict[str, int] = {}
        self.batch: Any = None
        self._seen = 0
        self._last = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        self.clock.module = pl_module
        wait_for_device(pl_module)
        now = time.perf_counter()
        if self._seen <= WARM_UP:
            self.batch = batch
            self.clock.recorded_durations.clear()
        else:
            self.seconds.append(now - self._last)
            for name, count in units(batch).items():
                self.units[name] = self.units.get(name, 0) + count
            trainer.should_stop = sum(self.seconds) > SECONDS and len(self.seconds) >= LEAST
        self._last = now

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()


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
    trainer.profiler = Clock()  # type: ignore[attr-defined]
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
    figures |= _split(clock, timed.seconds)
    missing: dict[str, str] = {}
    try:
        figures |= _prediction(trainer, module, data, clock)
    except Exception as error:  # not every module predicts from the batches of validation
        missing["predict/…_per_second"] = first_line(error, named=True)
    batch = timed.batch
    step = step_of(trainer, module, batch)
    peak = peak_multiply_adds(module.device, _dtype(trainer))
    figures["peak_multiply_adds_per_second"] = peak
    try:
        # a backward has two products for each one of the forward
        done = 3 * count_multiply_adds(step) * len(timed.seconds)
        figures["train/share_of_peak"] = done / whole / peak
    except Exception as error:  # a step of somebody's own, outside of training
        missing["train/share_of_peak"] = first_line(error, named=True)
    kernels = compare_kernels(trainer, module, step)
    figures |= {f"backend/{name}_seconds": found for name, (found, _) in kernels.items() if found}
    return figures, _markdown(figures, missing, kernels)


def _split(clock: Clock, seconds: list[float]) -> dict[str, float]:
    """Median seconds of a step, by part. Lightning's optimizer step has forward and backward in it,
    and zeroing the gradients, which is counted as the optimizer's."""
    forward, backward = clock.usual(".training_step"), clock.usual(".backward")
    parts = {
        "data": clock.usual("train_dataloader_next", ".batch_to_device"),
        "forward": forward,
        "backward": backward,
        "optimizer": max(0.0, clock.usual(".optimizer_step") - forward - backward),
    }
    whole = statistics.median(seconds)
    parts |= {"other": max(0.0, whole - sum(parts.values()))}
    return {**{f"step/{name}_seconds": s for name, s in parts.items()}, "step/seconds": whole}


def _prediction(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, clock: Clock
) -> dict[str, float]:
    """Of `predict_step` on the batches of validation, data included."""
    loader = data.val_dataloader()
    counts: dict[str, int] = {}
    for number, batch in enumerate(loader):
        if number == LEAST:
            break
        for name, count in units(batch).items():
            counts[name] = counts.get(name, 0) + count
    trainer.limit_predict_batches = LEAST
    found: dict[str, list[float]] = {}
    for number in range(4):
        clock.recorded_durations.clear()
        trainer.predict(module, dataloaders=loader, return_predictions=False)
        recorded = clock.recorded_durations.items()
        ends = ("predict_next", ".predict_step", ".batch_to_device")
        seconds = sum(sum(v) for action, v in recorded if action.endswith(ends))
        if number:  # the first warms up
            for name, count in counts.items():
                found.setdefault(name, []).append(count / seconds)
    return {f"predict/{name}_per_second": statistics.median(v) for name, v in found.items()}


def _dtype(trainer: Trainer) -> torch.dtype:
    """What products are computed in."""
    precision = str(trainer.precision)
    if precision.startswith("bf16"):
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    return torch.float64 if precision.startswith("64") else torch.float32


def peak_multiply_adds(device: torch.device, dtype: torch.dtype) -> float:
    """Multiply-adds per second of the best of some products of square matrices, in this process.

    By the library that torch's `@` takes and, where that is another, by the one that attnkit's
    layers take in prediction: the peak is the machine's.
    """
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    with torch.no_grad():
        for number in range(16):
            started = time.perf_counter()
            a @ b if number % 2 else plain_linear(a, b, None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    return size**3 / min(seconds)


def compare_kernels(
    trainer: Trainer, module: LightningModule, step: Callable[[], Any]
) -> dict[str, tuple[float | None, str]]:
    """Of each kernel, forced in all layers that it can serve: seconds of forward and backward, the
    median of alternating rounds, and what there is to say; "auto" is what runs otherwise."""
    layers: list[Any] = [
        m for m in module.modules() if isinstance(getattr(m, "backend", None), str)
    ]
    own = [layer.backend for layer in layers]
    module.train()
    served: dict[str, list[Any]] = {}
    said: dict[str, str] = {}
    if layers:
        with suppress(Exception):
            _timed_step(module, step)
            served["auto"] = []
    for name in [kernel.name for kernel in BACKENDS] if "auto" in served else []:
        for layer in layers:
            layer.backend = name
            try:
                with torch.no_grad():
                    step()
                served.setdefault(name, []).append(layer)
            except UnsupportedError as error:
                said[name] = str(error).partition(": ")[2] or str(error)
            except Exception as error:
                said[name] = "out of memory" if is_out_of_memory(error) else type(error).__name__
            _reset(layers, own)
    seconds: dict[str, list[float]] = {name: [] for name in served}
    names = list(served)
    for number in range(ROUNDS + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for layer in served[name]:
                layer.backend = name
            try:
                found = _timed_step(module, step)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said[name], found = "out of memory", None
            _reset(layers, own)
            if number and found is not None:
                seconds[name].append(found)
    for name, some in served.items():
        if 0 < len(some) < len(layers):
            said[name] = f"{len(some)} of {len(layers)} layers; {said.get(name, '')}"
        elif name not in said or seconds[name]:
            said[name] = ""
    found_all = {n: (statistics.median(s) if s else None, said[n]) for n, s in seconds.items()}
    return found_all | {n: (None, why) for n, why in said.items() if n not in found_all}


def _reset(layers: list[Any], own: list[str]) -> None:
    for layer, name in zip(layers, own, strict=True):
        layer.backend = name


def _timed_step(module: LightningModule, step: Callable[[], Any]) -> float:
    wait_for_device(module)
    started = time.perf_counter()
    step().backward()
    wait_for_device(module)
    seconds = time.perf_counter() - started
    module.zero_grad()
    return seconds


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
