"""`doctor`: every attention of a machine, or of a model, held to the definition."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnkit.checks.doctor.attentions import attentions, devices
from attnkit.checks.doctor.cases import cases
from attnkit.checks.doctor.examine import Examination
from attnkit.checks.doctor.model import examine_model
from attnkit.checks.doctor.report import DoctorReport, Fault, Row
from attnkit.checks.doctor.times import timed_cases, times
from attnkit.core.kernels import ledger

Progress = Callable[[float, str], None]
DTYPES = ("float32", "bfloat16", "float16", "float64")
FEW = 6  # of the cases one in so many is asked in further dtypes, and of what is slow


def doctor(
    model: nn.Module | None = None,
    inputs: Sequence[Any] = (),
    *,
    quick: bool = False,
    only: str = "",
    record: bool = True,
    progress: Progress | None = None,
) -> DoctorReport:
    """Hold every attention that this machine can run to its definition, and tell what is wrong.

        print(attnkit.doctor())                            # python -m attnkit doctor
        print(attnkit.doctor(my_model, [images]))          # also the attention that it calls

    Asked are attnkit's kernels, torch's `scaled_dot_product_attention` by each of its kernels,
    `nn.MultiheadAttention`, FlexAttention, on a GPU `varlen_attn`, and torch_geometric's `GATConv`,
    `GATv2Conv` and `TransformerConv` if it is there. Each computes cases that faults in public
    needed (`attnkit.checks.doctor.cases`), held to float64:

        output = softmax(query · keyᵀ · scale + bias) · value, over the keys that the mask allows

    and so are its gradients. `check_attention` then looks at what needs no definition: causality,
    padding, neighbours in the batch, repetition. Dropout is held to its share and scale.

    Args:
        model: also a model, which is run in evaluation mode. Its attention is held to the
            definition at the shapes it has there.
        inputs: what the model is called with.
        quick: fewer lengths and dtypes, no memory and no times. Below 20 s on two cores; the whole
            takes below 120 s.
        only: attentions with this in their name.
        record: write what is found, and unless `quick` how long kernels take, to the ledger that
            `backend="auto"` obeys (`ATTNKIT_LEDGER`).
        progress: called with the share that is done and what comes next.

    Returns:
        The report, false where something is wrong.

    Raises:
        ValueError: `only` names nothing; the model runs no attention that is seen.
        LedgerError: the ledger cannot be written.
    """
    started = time.perf_counter()
    tell = progress or (lambda share, what: None)
    todo = [
        Examination(attention, device, dtype)
        for device in devices()
        for attention in attentions(device)
        for dtype in DTYPES[: 4 if not quick else 1 if attention.is_slow else 2]
        if dtype in attention.dtypes and only in attention.name
    ]
    if not todo:
        names = ", ".join(attention.name for attention in attentions("cpu"))
        raise ValueError(f"only: {only!r} is in none of the names {names}")
    asked = list(cases(quick=quick))
    rows: list[Row] = []
    faults: list[Fault] = []
    with _undisturbed():
        if model is not None:
            tell(0.0, type(model).__name__)
            rows, faults = examine_model(model, tuple(inputs))
        for number, examination in enumerate(todo):
            tell(number / len(todo), examination.name)
            is_first = examination.dtype == "float32" and not examination.attention.is_slow
            examination.ask(asked if is_first else asked[::FEW])
            if is_first:
                examination.properties()
                examination.dropout()
                examination.costs(memory=not quick)
            elif not quick:
                examination.dropout()
        if record and ledger.path() is not None:
            for device in devices():
                _record(device, todo, is_timed=not (quick or only), tell=tell)
    for examination in todo:
        faults += examination.faults
        rows += [examination.row()] if examination.num_cases else []
    return DoctorReport(machine(), tuple(rows), tuple(faults), time.perf_counter() - started)


def _record(device: str, todo: list[Examination], *, is_timed: bool, tell: Progress) -> None:
    here = [each for each in todo if each.device == device and each.attention.kernel]
    found = [wrong for each in here for wrong in each.wrong]
    checked = {(each.attention.kernel, kind) for each in here for kind in each.kinds}
    timed: list[ledger.Timed] = []
    if is_timed:
        kernels = [each.attention for each in here if each.dtype == "float32" and each.num_cases]
        chosen = list(timed_cases(device))
        for number, case in enumerate(chosen):
            tell(number / len(chosen), f"times: {case}")
            timed += times(kernels, case)
    ledger.record(device, checked=checked, found=found, times=timed)


def machine() -> dict[str, str]:
    """What the findings belong to: processors, versions, threads."""
    told = {device: ledger.machine(device) for device in devices()}
    return {**told, "Python": platform.python_version(), "threads": str(torch.get_num_threads())}


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
