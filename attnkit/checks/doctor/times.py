"""Times of the kernels on this machine, for the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from attnkit.checks.doctor.attentions import Attention
from attnkit.checks.doctor.cases import Case
from attnkit.checks.doctor.examine import Names, Refused, computed, inputs_of
from attnkit.core.kernels.ledger import Timed, kind_of, size_of

ROUNDS = 5
HOPELESS = 3.0  # a kernel that takes this multiple of the fastest is not measured again
SLOW = ("blockwise", "math", "reference")  # kernels that store all scores, or loop in Python


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
