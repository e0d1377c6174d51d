"""Which attention kernel is fastest in a model: each is forced in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning import LightningModule

from attnkit.core.kernels.choose import BACKENDS, UnsupportedError
from attnkit.launch.errors import is_out_of_memory
from attnkit.lightning.callbacks.throughput import wait_for_device

ROUNDS = 5


def compare_kernels(
    module: LightningModule, step: Callable[[], Any]
) -> dict[str, tuple[float | None, str]]:
    """Of each kernel, forced in all layers that it can serve: seconds of forward and backward, the
    median of alternating rounds, and what there is to say; "auto" is what runs otherwise."""
    layers = [m for m in module.modules() if isinstance(getattr(m, "backend", None), str)]
    module.train()
    served: dict[str, list[Any]] = {}
    said: dict[str, str] = {}
    with suppress(Exception):
        _timed_step(module, step)
        served = {"auto": []} if layers else {}
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
    names = list(served)
    for number in range(ROUNDS + 1):
        for name in names[number % len(names) :] + names[: number % len(names)] if names else []:
            try:
                with _forced(served[name], name):
                    found = _timed_step(module, step)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said[name] = "out of memory"
            else:
                seconds[name] += [found] if number else []  # the first round warms up
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
    started = time.perf_counter()
    step().backward()
    wait_for_device(module)
    seconds = time.perf_counter() - started
    module.zero_grad()
    return seconds
