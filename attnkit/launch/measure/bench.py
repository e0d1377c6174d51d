"""`run=bench`: how fast a model trains, where the time goes, and which attention kernel wins.

No callback and no logger of attnkit's runs beside it.
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
WARM_UP = 3  # steps
SECONDS = 5.0  # of timed steps
LEAST = 5  # steps
ROUNDS = 5  # of the comparison of kernels


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
    """The unit in which a batch is counted: images, words, nodes or samples."""
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
    """Time steps of training and the kernels; leaves bench.md."""
    data = run.make_data()
    module = run.make_module()
    trainer = run.make_trainer()
    clock = trainer.profiler = Clock(module)  # type: ignore[attr-defined]
    if trainer.world_size > 1:
        raise UserError("run=bench: one process; trainer.devices=1 trainer.strategy=auto")
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


# --- one step, and which kernel is fastest in it --------------------------------------------------


def step_of(trainer: Trainer, module: LightningModule, batch: Any) -> Callable[[], Any]:
    """Computes the loss of this batch outside of training, as often as it is called.

    Nothing of the module is logged any more.
    """
    silent: Any = module
    silent.log = silent.log_dict = lambda *_, **__: None
    module.train()
    batch = module.transfer_batch_to_device(batch, module.device, 0)

    def step() -> Any:
        with trainer.precision_plugin.train_step_context():
            found = module.training_step(batch, 0)
        return found["loss"] if isinstance(found, Mapping) else found

    return step


def compare_kernels(
    module: LightningModule, step: Callable[[], Any]
) -> dict[str, tuple[float | None, str]]:
    """Seconds of forward and backward for each kernel, and what there is to say of it.

    A kernel is forced in all layers that it can serve; "auto" is what runs otherwise. Seconds are
    the median of rounds in which the kernels take turns.
    """
    layers = [m for m in module.modules() if isinstance(getattr(m, "backend", None), str)]
    module.train()
    served: dict[str, list[Any]] = {}
    said: dict[str, str] = {}
    if layers:
        with suppress(Exception):  # a step of somebody's own, outside of training
            _timed_step(module, step)
            served["auto"] = []
    for name in [kernel.name for kernel in BACKENDS] if served else []:
        for layer in layers:
            try:
                with _forced([layer], name), torch.no_grad():
                    step()
                served.setdefault(name, []).append(layer)
            except UnsupportedError as error:
                said[name] = str(error).partition(": ")[2] or str(error)
            except Exception as error:
                said[name] = "out of memory" if is_out_of_memory(error) else type(error).__name__
    seconds: dict[str, list[float]] = {name: [] for name in served}
    turns = list(served)
    for number in range(ROUNDS + 1):
        for name in turns:
            try:
                with _forced(served[name], name):
                    found = _timed_step(module, step)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said[name] = "out of memory"
            else:
                seconds[name] += [found] if number else []  # the first round warms up
        turns = turns[1:] + turns[:1]
    for name, some in served.items():
        if 0 < len(some) < len(layers):
            said[name] = f"{len(some)} of {len(layers)} layers; {said.get(name, '')}"
        elif seconds[name]:
            said[name] = ""
    medians = {name: statistics.median(found) for name, found in seconds.items() if found}
    return {name: (medians.get(name), said.get(name, "")) for name in {**served, **said}}


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
