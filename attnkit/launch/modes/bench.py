"""`run=bench`: how fast a model trains, where the time goes, and which attention kernel is fastest.

No callback or logger of attnkit takes part.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from attnkit.core.kernels.choose import BACKENDS, UnsupportedError
from attnkit.launch.errors import is_out_of_memory
from attnkit.launch.run import Run
from attnkit.lightning.callbacks.meter import Laps, num_samples, wait_for_device
from attnkit.lightning.errors import UserError

FILE = "bench.md"
WARM_UP = 3  # steps that are not timed
SECONDS = 5.0  # least duration of all timed steps
LEAST = 5  # least number of timed steps
ROUNDS = 5  # rounds in which kernels are compared


class Clock(SimpleProfiler):
    """Lightning's profiler of durations, with synchronization of the GPU."""

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
        """Return the sum of the median seconds of all actions whose names have these endings."""
        recorded = self.recorded_durations.items()
        return sum(statistics.median(v) for name, v in recorded if v and name.endswith(endings))

    def summary(self) -> str:
        """Return nothing, since the numbers are in the tables."""
        return ""


class _Timed(Callback):
    """Times and counts the steps after the warm-up, and ends training after some seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: list[float] = []
        self.units: Counter[str] = Counter()
        self._warm_up = WARM_UP
        self._laps = Laps()

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._laps.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = self._laps.lap(pl_module)
        self.batch = batch
        if self._warm_up:
            self._warm_up -= 1
            self.clock.recorded_durations.clear()
        else:
            self.seconds.append(seconds)
            self.units.update(units(batch))
            trainer.should_stop = sum(self.seconds) > SECONDS and len(self.seconds) >= LEAST


def units(batch: Any) -> dict[str, int]:
    """Return the size of a batch by unit: images, words, nodes, graphs or samples."""
    if hasattr(batch, "edge_index"):
        samples, nodes = num_samples(batch), len(batch.x)
        return {"nodes": nodes} if samples == nodes else {"graphs": samples, "nodes": nodes}
    counts = {}
    image = batch.get("image") if isinstance(batch, Mapping) else None
    if image is None and isinstance(batch, list | tuple) and batch:
        image = batch[0]
    if isinstance(image, Tensor) and image.ndim == 4:
        counts["images"] = len(image)
    if isinstance(batch, Mapping) and isinstance(batch.get("words"), Tensor):
        counts["words"] = int((batch["words"] != 0).sum())  # 0 is padding
    return counts or {"samples": num_samples(batch)}


def work(run: Run) -> dict[str, float]:
    """Time training steps and attention kernels, and write bench.md."""
    data = run.make_data()
    module = run.make_module()
    trainer = run.make_trainer()
    clock = trainer.profiler = Clock(module)  # type: ignore[attr-defined]
    if trainer.world_size > 1:
        raise UserError(
            "run=bench: expected one process; set trainer.devices=1 trainer.strategy=auto"
        )
    run.ready()
    timed = _Timed(clock)
    trainer.callbacks.append(timed)  # type: ignore[attr-defined]
    trainer.limit_val_batches = 0
    trainer.fit_loop.min_epochs = 0
    trainer.fit_loop.max_epochs = 10_000  # the clock ends it
    trainer.fit(module, datamodule=data)
    if not timed.seconds:
        raise UserError(f"run=bench: needs more than {WARM_UP} steps; trainer.max_steps ends it")
    figures: dict[str, float] = {"batches": len(timed.seconds)}
    median = statistics.median(timed.seconds)
    total = median * len(timed.seconds)  # without slow steps, which other processes cause
    for name, count in timed.units.items():
        figures[f"train/{name}_per_second"] = count / total
    figures |= _split(clock, median)
    kernels = compare_kernels(module, step_of(trainer, module, timed.batch))
    figures |= {f"backend/{name}_seconds": found for name, (found, _) in kernels.items() if found}
    (run.folder / FILE).write_text(_markdown(figures, kernels), encoding="utf-8")
    return figures


def _split(clock: Clock, whole: float) -> dict[str, float]:
    """Return the median seconds of a step, by part.

    Lightning's optimizer step includes forward and backward, which are subtracted, and zeroing the
    gradients, which counts as the optimizer's.
    """
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


# --- one step, and which kernel is fastest in it --------------------------------------------------


def step_of(trainer: Trainer, module: LightningModule, batch: Any) -> Callable[[], Any]:
    """Return a function that computes the loss of this batch outside of training.

    The module logs nothing any more.
    """
    silent: Any = module
    silent.log = silent.log_dict = lambda *_, **__: None
    module.train()
    batch = module.transfer_batch_to_device(batch, module.device, 0)

    def step() -> Any:
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(batch, 0)
        return output["loss"] if isinstance(output, Mapping) else output

    return step


def compare_kernels(
    module: LightningModule, step: Callable[[], Any]
) -> dict[str, tuple[float | None, str]]:
    """Return for each kernel the seconds of forward and backward, and a remark.

    A kernel is forced in all layers that it supports; "auto" is the usual choice. The time is the
    median over rounds in which the kernels take turns. The remark says why a kernel was not timed,
    or in how many layers it ran.
    """
    layers = [m for m in module.modules() if isinstance(getattr(m, "backend", None), str)]
    module.train()
    served: dict[str, list[Any]] = {}
    remarks: dict[str, str] = {}
    if layers:
        with suppress(Exception):  # a user's training_step may not work outside of training
            _timed_step(module, step)
            served["auto"] = []
    for name in [kernel.name for kernel in BACKENDS] if served else []:
        for layer in layers:
            try:
                with _forced([layer], name), torch.no_grad():
                    step()
                served.setdefault(name, []).append(layer)
            except UnsupportedError as error:
                remarks[name] = str(error).partition(": ")[2] or str(error)
            except Exception as error:
                remarks[name] = "out of memory" if is_out_of_memory(error) else type(error).__name__
    seconds: dict[str, list[float]] = {name: [] for name in served}
    turns = list(served)
    for number in range(ROUNDS + 1):
        for name in turns:
            try:
                with _forced(served[name], name):
                    duration = _timed_step(module, step)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                remarks[name] = "out of memory"
            else:
                seconds[name] += [duration] if number else []  # the first round warms up
        turns = turns[1:] + turns[:1]
    for name, some in served.items():
        if 0 < len(some) < len(layers):
            remarks[name] = f"{len(some)} of {len(layers)} layers; {remarks.get(name, '')}"
        elif seconds[name]:
            remarks[name] = ""
    medians = {name: statistics.median(times) for name, times in seconds.items() if times}
    return {name: (medians.get(name), remarks.get(name, "")) for name in {**served, **remarks}}


@contextmanager
def _forced(layers: Sequence[Any], name: str) -> Iterator[None]:
    own = [layer.backend for layer in layers]
    try:
        for layer in layers:
            layer.backend = name
        yield
    finally:
        for layer, before in zip(layers, own, strict=True):
            layer.backend = before


def _timed_step(module: LightningModule, step: Callable[[], Any]) -> float:
    wait_for_device(module)
    laps = Laps()
    step().backward()
    seconds = laps.lap(module)
    module.zero_grad()
    return seconds
