"""Tests whether `backend="auto"` takes the fastest kernel, by forward + backward of all.

Medians of rounds in turns; a kernel that needs more than a fifth of a second is tried once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from measure import alternate

import attnkit
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.choose import BACKENDS, choose_backend

SLOW = 0.2
SKIPPED = ("reference", "blockwise", "hard", "linear", "delta_rule")
HALF, SINGLE = torch.bfloat16, torch.float32
SHORT = (16, 49, 64, 128, 256, 512)
NEW_LENGTHS = range(301, 401, 5)


@dataclass
class Work:
    """One attention: batch, heads, key/value heads, queries, keys, head dimension."""

    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype = HALF
    options: Callable[[], dict] = dict
    trains: bool = True
    inputs: dict = field(default_factory=dict)


def works(device: str) -> dict[str, Work]:
    if device == "cpu":
        return {"ViT": Work((2, 2, 2, 17, 17, 16), SINGLE)}

    def lengths(*sizes: int) -> torch.Tensor:
        return torch.tensor(sizes, device=device)

    def short(tokens: int) -> tuple[int, int, int, int, int, int]:
        return 2**17 // tokens, 8, 8, tokens, tokens, 64

    def table(tokens: int) -> Callable[[], dict]:
        return lambda: {"bias": torch.randn(8, tokens, tokens, device=device, dtype=HALF)}

    long = (4, 12, 12, 2048, 2048, 64)
    return {
        "ViT-B, 128 × 197": Work((128, 12, 12, 197, 197, 64)),
        "ViT-B, float32": Work((128, 12, 12, 197, 197, 64), SINGLE),
        "digits ViT, 64 × 17": Work((64, 4, 4, 17, 17, 16), SINGLE),
        "long": Work(long),
        "long, no gradient": Work(long, trains=False),
        "long, float32": Work(long, SINGLE),
        "long, head 128": Work((4, 12, 12, 2048, 2048, 128)),
        "long, head 80": Work((4, 12, 12, 2048, 2048, 80)),
        "long, grouped 12 : 3": Work((4, 12, 3, 2048, 2048, 64)),
        "long, causal": Work(long, options=lambda: {"mask": attnkit.Causal()}),
        "long, causal, float32": Work(long, SINGLE, lambda: {"mask": attnkit.Causal()}),
        **{f"{tokens} tokens": Work(short(tokens)) for tokens in SHORT},
        **{
            f"{tokens} tokens, bias": Work(short(tokens), options=table(tokens)) for tokens in SHORT
        },
        "long, padding": Work(
            long, options=lambda: {"mask": attnkit.Padding(lengths(2048, 1000, 500, 1500))}
        ),
        "long, bias": Work(
            long, options=lambda: {"bias": torch.randn(12, 2048, 2048, device=device, dtype=HALF)}
        ),
        "long, learned bias": Work(
            long,
            options=lambda: {
                "bias": torch.randn(12, 2048, 2048, device=device, dtype=HALF, requires_grad=True)
            },
        ),
        "long, dropout": Work(long, options=lambda: {"dropout_p": 0.1}),
        "decoding, 1 × 512": Work((32, 8, 8, 1, 512, 64), trains=False),
        "decoding, 1 × 4096": Work((32, 8, 8, 1, 4096, 64), trains=False),
        "decoding, grouped, 1 × 4096": Work((4, 32, 8, 1, 4096, 128), trains=False),
        "decoding, float32": Work((32, 8, 8, 1, 512, 64), SINGLE, trains=False),
        "Swin, 64 windows of 49, bias": Work(
            (2048, 4, 4, 49, 49, 32),
            options=lambda: {"bias": torch.randn(4, 49, 49, device=device, dtype=HALF)},
        ),
        "window ± 64": Work(
            (2, 8, 8, 8192, 8192, 64), options=lambda: {"mask": attnkit.Window(64, 64)}
        ),
        "window ± 64, float32": Work(
            (2, 8, 8, 8192, 8192, 64), SINGLE, lambda: {"mask": attnkit.Window(64, 64)}
        ),
        "grid 64 × 64, radius 4": Work(
            (2, 8, 8, 4096, 4096, 64), options=lambda: {"mask": attnkit.Window2d(64, 64, 4, 4)}
        ),
        "packed, 64 of 128": Work(
            (1, 8, 8, 8192, 8192, 64), options=lambda: {"mask": attnkit.Packed([128] * 64)}
        ),
        "packed, causal, 4 of 2048": Work(
            (1, 8, 8, 8192, 8192, 64),
            options=lambda: {"mask": attnkit.Packed([2048] * 4) & attnkit.Causal()},
        ),
    }


def program(work: Work, device: str, backend: str, options: dict) -> Callable[[], object]:
    batch, heads, kv_heads, queries, keys, dim = work.shape
    shapes = [(batch, heads, queries, dim), *2 * [(batch, kv_heads, keys, dim)]]
    tensors = [torch.randn(shape, device=device, dtype=work.dtype) for shape in shapes]
    if not work.trains:
        return lambda: attnkit.attend(*tensors, backend=backend, **options)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    leaves = tensors + [t for t in options.values() if getattr(t, "requires_grad", False)]
    gradient = torch.randn(shapes[0], device=device, dtype=work.dtype)

    def run():
        output = attnkit.attend(*tensors, backend=backend, **options)
        return torch.autograd.grad(output, leaves, gradient)

    return run


def rows(device: str, _) -> Iterator[dict]:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for name, work in works(device).items():
        options = work.options()
        batch, heads, kv_heads, queries, keys, dim = work.shape
        empty = [
            torch.empty(shape, device=device, dtype=work.dtype, requires_grad=work.trains)
            for shape in [(batch, heads, queries, dim), *2 * [(batch, kv_heads, keys, dim)]]
        ]
        inputs = check_inputs(*empty, **options)
        chosen = choose_backend(inputs).name
        programs, slow = {}, {}
        for backend in BACKENDS:
            if backend.name in SKIPPED or not backend.serves(inputs):
                continue
            try:
                programs[backend.name] = program(work, device, backend.name, options)
                programs[backend.name]()
                synchronize()
                start = perf_counter()
                programs[backend.name]()
                synchronize()
                if (taken := perf_counter() - start) > SLOW and backend.name != chosen:
                    slow[backend.name] = taken
                    del programs[backend.name]
            except Exception as failure:
                print(name, backend.name, repr(failure)[:2000], flush=True)
                programs.pop(backend.name, None)
                slow[backend.name] = float("nan")
        if chosen not in programs:
            yield {
                "attention": name,
                "auto": chosen,
                "ms": "failed",
                "others, ms": "",
                "slower": "",
            }
            continue
        times = alternate(programs, 15, synchronize=synchronize)
        medians = {backend: times.median(backend) for backend in programs} | slow
        fastest = min(programs, key=times.median)
        others = sorted(
            (seconds, backend) for backend, seconds in medians.items() if backend != chosen
        )
        yield {
            "attention": name,
            "auto": chosen,
            "ms": f"{1e3 * times.median(chosen):.3f}",
            "others, ms": ", ".join(f"{b} {1e3 * seconds:.3f}" for seconds, b in others),
            "slower": f"{times.ratio(chosen, fastest):.2f} × {fastest}",
        }
        del programs, options, empty, inputs
    if device == "cuda":
        yield {
            "first calls, each of another length": f"{len(NEW_LENGTHS)} lengths, ms of each",
            **{name: f"{1e3 * first_calls(name, device):.2f}" for name in ("cudnn", "flash")},
        }


def first_calls(backend: str, device: str) -> float:
    """Median seconds of forward + backward at a length that was not seen before."""
    seconds = []
    for length in NEW_LENGTHS:
        step = program(Work((8, 8, 8, length, length, 64)), device, backend, {})
        torch.cuda.synchronize()
        start = perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return median(seconds)
