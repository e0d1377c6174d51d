"""`doctor`: every attention of a machine, held to the definition."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnkit.checks.doctor.attentions import attentions, devices
from attnkit.checks.doctor.cases import cases
from attnkit.checks.doctor.examine import Examination
from attnkit.checks.doctor.report import DoctorReport

Progress = Callable[[float, str], None]
QUICK_SHARE = 6  # of the cases one in so many is asked in further dtypes, and of what is slow


def doctor(*, quick: bool = False, progress: Progress | None = None) -> DoctorReport:
    started = time.perf_counter()
    dtypes = ("float32", "bfloat16") if quick else ("float32", "bfloat16", "float16", "float64")
    todo = [
        Examination(attention, device, dtype)
        for device in devices()
        for attention in attentions(device, quick=quick)
        for dtype in dtypes
        if dtype in attention.dtypes
    ]
    chosen = list(cases(quick=quick))
    with _undisturbed():
        for number, examination in enumerate(todo):
            if progress is not None:
                progress(number / len(todo), examination.name)
            is_whole = examination.dtype == "float32" and not examination.attention.is_slow
            examination.ask(chosen if is_whole else chosen[::QUICK_SHARE])
            if is_whole or not quick:
                examination.properties()
                examination.dropout()
                examination.costs(memory=not quick)
    rows = tuple(examination.row() for examination in todo if examination.num_cases)
    faults = tuple(fault for examination in todo for fault in examination.faults)
    return DoctorReport(machine(), rows, faults, time.perf_counter() - started)


def machine() -> dict[str, str]:
    """The processors and the versions."""
    return {"torch": torch.__version__, "Python": platform.python_version()}


@contextmanager
def _undisturbed() -> Iterator[None]:
    with (
        torch.random.fork_rng(),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
