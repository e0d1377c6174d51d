"""`doctor` compares every attention of a machine, or of a model, with the definition."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from typing import Any

import torch
from torch import nn, overrides

from attnkit.checks.attentions import Attention, attentions, devices
from attnkit.checks.cases import Case, cases
from attnkit.checks.examine import Examination, Names, Refused, computed, inputs_of
from attnkit.checks.model import examine_model
from attnkit.checks.report import DoctorReport, Fault, Row
from attnkit.core.kernels import ledger
from attnkit.core.kernels.ledger import Timed, kind_of, size_of
from attnkit.core.key_masking import HIDING
from attnkit.core.names import nearest
from attnkit.core.operators.precision import EXACT

Progress = Callable[[float, str], None]
DTYPES = ("float32", "bfloat16", "float16", "float64")
FEW = 6  # further dtypes and slow attentions run one case in six
SLOW_SECONDS = 10.0  # a quick run starts no further slow case then, since a GPU compiles each case
ROUNDS = 5
HOPELESS = 3.0  # a kernel that takes this multiple of the fastest is not measured again
SLOW = ("blockwise", "math", "reference")  # kernels that store all scores, or loop in Python


def doctor(
    model: nn.Module | None = None,
    inputs: Sequence[Any] = (),
    *,
    quick: bool = False,
    only: str = "",
    record: bool = True,
    progress: Progress | None = None,
) -> DoctorReport:
    """Compare every attention that this machine can run with its definition, and report faults.

        print(attnkit.doctor())                            # python -m attnkit doctor
        print(attnkit.doctor(my_model, [images]))          # also the attention that it calls

    The doctor examines attnkit's kernels, torch's `scaled_dot_product_attention` with each of its
    kernels, `nn.MultiheadAttention`, FlexAttention, `varlen_attn` on a GPU, and torch_geometric's
    `GATConv`, `GATv2Conv` and `TransformerConv` if it is installed. Each computes cases that
    trigger publicly reported bugs (`attnkit.checks.cases`). Its output and gradients are
    compared with float64:

        output = softmax(query · keyᵀ · scale + bias) · value, over the keys that the mask allows

    `check_attention` then checks properties that need no definition: causality, padding, neighbours
    in the batch, repetition. The share and scale of dropout are checked too.

    Args:
        model: a model to examine as well, in evaluation mode. Its attention is compared with the
            definition at the shapes it has there.
        inputs: the model's inputs.
        quick: use fewer lengths and dtypes, and measure no memory and no times. It takes less than
            20 s on two cores; a whole run takes less than 120 s.
        only: examine only attentions with this in their name, ignoring case.
        record: write the findings on attnkit's kernels, and unless `quick` their times, to the
            ledger that `backend="auto"` obeys (`ATTNKIT_LEDGER`). A whole run also removes entries
            that it does not find again. The report says if the ledger cannot be written.
        progress: function that is called with the finished share and the name of the next step.

    Returns:
        The report, which is false if something is wrong.

    Raises:
        ValueError: `only` matches no attention, or none that can run here; the model raises, or
            runs no visible attention.
    """
    started = time.perf_counter()
    tell = progress or (lambda share, what: None)
    todo = [
        Examination(attention, device, dtype)
        for device in devices()
        for attention in attentions(device)
        for dtype in DTYPES[: (1 if attention.is_slow else 2) if quick else 4]
        if not (attention.is_slow and dtype in ("float16", "float64"))
        if dtype in attention.dtypes and only.lower() in attention.name.lower()
    ]
    if not todo:
        names = [attention.name for attention in attentions("cpu")]
        hint = nearest(only, names) or f"; there are {', '.join(names)}"
        raise ValueError(f"only: {only!r} is in no name of an attention{hint}")
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
            seconds = SLOW_SECONDS if quick and examination.attention.is_slow else inf
            examination.ask(asked if is_first else asked[::FEW], seconds)
            if is_first:
                examination.properties()
                examination.dropout()
                examination.costs(memory=not quick)
            elif not quick:
                examination.dropout()
        said = "nothing is written to the ledger"
        if record and ledger.path() is not None and any(each.kinds for each in todo):
            said = _record(todo, is_quick=quick, is_timed=not (quick or only), tell=tell)
    for examination in todo:
        faults += examination.faults
        rows += [examination.row()] if examination.num_cases or examination.faults else []
    asked_of = {each.attention.name for each in todo if each.num_cases or each.faults}
    refused = {each.attention.name: each.reason for each in todo}
    refused = {name: reason for name, reason in refused.items() if name not in asked_of}
    if not rows:
        first = next(iter(refused))
        raise ValueError(f"only: {first} cannot run here: {refused[first]}")
    seconds = time.perf_counter() - started
    return DoctorReport(machine(), tuple(rows), tuple(faults), refused, said, seconds)


def _record(todo: list[Examination], *, is_quick: bool, is_timed: bool, tell: Progress) -> str:
    """Write the findings to the ledger; a quick run removes no entries, since it checks less."""
    for device in devices():
        here = [each for each in todo if each.device == device and each.attention.kernel]
        found = [wrong for each in here for wrong in each.wrong]
        checked = {(each.attention.kernel, kind) for each in here for kind in each.kinds}
        timed: list[ledger.Timed] = []
        if is_timed:
            kernels = {each.attention.kernel: each.attention for each in here if each.num_cases}
            chosen = list(timed_cases(device))
            for number, case in enumerate(chosen):
                tell(number / len(chosen), f"times: {case}")
                timed += times(list(kernels.values()), case)
        try:
            file = ledger.record(
                device, checked=() if is_quick else checked, found=found, times=timed
            )
        except ledger.LedgerError as error:
            return f"nothing is written to the ledger: {error}"
    return f'backend="auto" obeys the ledger here: {file}'


def machine() -> dict[str, str]:
    """Return what the findings depend on: processors, versions, threads."""
    told = {device: ledger.machine(device) for device in devices()}
    return {**told, "Python": platform.python_version(), "threads": str(torch.get_num_threads())}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run the block with torch's default settings and without active modes, in this thread.

    Afterwards random state, grad mode, default device, precision and warnings are restored.
    """
    device, precision = torch.get_default_device(), torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in devices():
            stack.enter_context(torch.autocast(kind, enabled=False))
        for opened in (HIDING, EXACT):
            stack.enter_context(opened.limited(0))
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
        if device.type != "cpu":
            stack.callback(torch.set_default_device, device)
            torch.set_default_device(None)
        while torch._C._len_torch_function_stack():
            stack.enter_context(overrides._pop_mode_temporarily())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def timed_cases(device: str) -> Iterator[Case]:
    """Yield typical cases of models, with masks for which the time depends only on the sizes."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    for mask in ("none", "causal", "window", "packed"):
        sizes = [(8, 256), (1, 1024), (8, 1024)]
        for batch, tokens in [*sizes, (1, 4096)] if mask in ("window", "packed") else sizes:
            yield Case(
                mask, "some", tokens, tokens, batch, 4, 4, 64, 64, dtype=dtype, device=device
            )
    yield Case("edges", "some", 2048, 2048, 1, 8, 8, 16, 16, dtype=dtype, device=device)


def times(kernels: Sequence[Attention], case: Case) -> Iterator[Timed]:
    """Yield the times of all fused kernels for a case, with and without a backward.

    A time is the minimum of several rounds, which other work on the machine affects least.
    """
    programs: dict[str, tuple[str, Names]] = {}
    for attention in kernels:
        lines = None if attention.kernel in SLOW else attention.lines(case)
        with suppress(Refused):
            if lines is not None:
                last = lines.split("\n", 1)[1]  # the mask is the same in all calls, as in a model
                programs[attention.kernel] = last, computed(attention, case)
    for trains in (True, False):
        calls = {kernel: _call(*program, trains) for kernel, program in programs.items()}
        seconds = {kernel: [_seconds(call, case.device)] for kernel, call in calls.items()}
        fastest = min((first[0] for first in seconds.values()), default=0.0)
        for _ in range(ROUNDS):
            for kernel, call in calls.items():
                if seconds[kernel][0] <= HOPELESS * fastest:
                    seconds[kernel].append(_seconds(call, case.device))
        if len(seconds) > 1:
            with torch.set_grad_enabled(trains):
                inputs = inputs_of(next(iter(programs.values()))[1])
                kind, size = kind_of(inputs), size_of(inputs)
            least = {kernel: min(each) for kernel, each in seconds.items()}
            if size is not None:
                yield Timed(kind, size, least)


def _call(lines: str, names: Names, trains: bool) -> Callable[[], None]:
    code = compile(lines, "<timed>", "exec")
    given = names["query"], names["key"], names["value"]

    def call() -> None:
        with torch.set_grad_enabled(trains):
            exec(code, names)
            if trains:
                torch.autograd.grad(names["output"].sum(), given)

    return call


def _seconds(call: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
