"""Masks against full and padded attention, forward + backward.

    python docs/benchmarks/masks.py [line] [memory] [grid] [packed] [compositions] [patterns] [plan]
        [sinks] [exact] [--busy 1]

- line: a window of ±128 at 32,768 tokens, 4 heads × 64, against full flash in the same run, and
  against itself at half the tokens;
- memory: the peak memory of a step with each of the thirteen masks, at 16,384 tokens, in a process
  of its own: beyond its inputs, and beyond inputs, output and gradients against flash without a
  mask;
- grid: a 2-D window of radius 3 on 64 × 64, 4 heads × 32, against flash with the boolean mask;
- packed: 64 sequences of lengths 16 to 512, 4 heads × 64, against SDPA on the padded batch;
- compositions: thirteen masks at 4,096 and 16,384 tokens, 4 heads × 64, one thread, processor time
  as a share of flash without a mask, beside the share of 64 × 64 blocks that the mask touches;
- patterns: Longformer's and BigBird's at 16,384 tokens, against flash without a mask;
- plan: the plans of masks at a million tokens, time and memory;
- sinks: a learned sink against none, 4,096 tokens, 4 heads × 64, one thread, processor time;
- exact: inside `attnkit.exact` against the same call outside: full and causal attention, packed and
  padded sequences, 4 or 8 heads × 64.

Programs alternate; a ratio is the median of the rounds' ratios. On a machine that others use too,
set OMP_WAIT_POLICY=passive: threads that spin while they wait hold up these short parallel regions.
"""

import argparse
import os
import subprocess
import sys
import time
from statistics import median

import numpy as np
import torch
from measure import alternate, busy, machine, peak_memory, table
from torch.nn import functional as F

import attnkit
from attnkit import Blocks, Causal, Dense, Packed, Padding, Window
from attnkit.core.masks.plan import NONE, QueryBlocks

WINDOW = attnkit.Window(128, 128)
MEMORY_TOKENS = 16_384


def tensors(heads: int, tokens: int, head_dim: int, batch: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = batch, heads, tokens, head_dim
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def step(function, inputs):
    output_gradient = torch.randn_like(inputs[0])

    def run():
        return torch.autograd.grad(function(*inputs), inputs, output_gradient)

    return run


def attention(**options):
    return lambda *inputs: attnkit.attend(*inputs, **options)


def row(what: str, times, ours: str, theirs: str) -> dict[str, str]:
    ratios = [a / b for a, b in zip(times.seconds[theirs], times.seconds[ours], strict=True)]
    return {
        "what": what,
        ours: f"{1e3 * times.median(ours):.1f} ms",
        theirs: f"{1e3 * times.median(theirs):.1f} ms",
        "ratio": f"{times.ratio(theirs, ours):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})",
    }


def line(pairs: int) -> None:
    programs = {
        "16,384 tokens": step(attention(mask=WINDOW), tensors(4, 16_384, 64)),
        "32,768 tokens": step(attention(mask=WINDOW), tensors(4, 32_768, 64)),
    }
    times = alternate(programs, 5 * pairs)
    print(table([row("window ±128, doubling", times, *programs)]))
    inputs = tensors(4, 32_768, 64)
    programs = {
        "window ±128": step(attention(mask=WINDOW), inputs),
        "full flash": step(attention(), inputs),
    }
    times = alternate(programs, pairs, warm_up=1)
    print(table([row("32,768 tokens", times, *programs)]))


def memory(_: int) -> None:
    names = ["no mask", *masks_of(MEMORY_TOKENS)]
    peaks = {}
    for name in names:
        command = sys.executable, __file__, "--peak", name
        peaks[name] = int(subprocess.run(command, check=True, capture_output=True).stdout)
    size = 4 * 4 * MEMORY_TOKENS * 64  # bytes of each input, the output and each gradient
    full = peaks["no mask"] - 4 * size
    rows = [
        {
            f"{MEMORY_TOKENS:,} tokens": name,
            "peak": f"{peak / 1e6:.0f} MB",
            "beyond output and gradients": f"{(peak - 4 * size) / 1e6:.0f} MB",
            "without a mask": f"{(peak - 4 * size) / full:.2f} ×",
        }
        for name, peak in peaks.items()
    ]
    print(table(rows))


def peak(name: str) -> None:
    mask = masks_of(MEMORY_TOKENS).get(name)
    print(peak_memory(step(attention(mask=mask), tensors(4, MEMORY_TOKENS, 64))))


def grid(pairs: int) -> None:
    mask = attnkit.Window2d(64, 64, 3, 3)
    dense = mask.dense(4096, 4096, torch.device("cpu"))
    inputs = tensors(4, 4096, 32)

    def full(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, dense)

    programs = {"2-D window": step(attention(mask=mask), inputs), "dense mask": step(full, inputs)}
    times = alternate(programs, 5 * pairs)
    print(table([row("radius 3 on 64 × 64", times, *programs)]))


def packed(pairs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 513, (64,), generator=generator)
    mask = attnkit.Packed(lengths)
    longest = int(lengths.max())
    real = torch.arange(longest) < lengths[:, None, None, None]
    one_row, padded = tensors(4, int(lengths.sum()), 64), tensors(4, longest, 64, batch=64)

    def pad(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, real)

    programs = {"packed": step(attention(mask=mask), one_row), "padded": step(pad, padded)}
    times = alternate(programs, 2 * pairs)
    most = 64 * longest**2 / int(lengths.square().sum())
    print(table([row(f"{int(lengths.sum()):,} tokens (at best {most:.2f} ×)", times, *programs)]))


def packed_lengths(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Return lengths of 16 to 512 tokens, whose sum is `tokens`; the last may be shorter."""
    ends = torch.randint(16, 513, (tokens // 16,), generator=generator).cumsum(0)
    return torch.tensor([0, *ends[ends < tokens].tolist(), tokens]).diff()


def masks_of(tokens: int) -> dict[str, attnkit.core.masks.Mask]:
    generator = torch.Generator().manual_seed(0)
    blocks = tokens // 64
    packed = Packed(packed_lengths(tokens, generator))
    grid = torch.rand(blocks, blocks, generator=generator) < 0.13 * 4096 / tokens
    is_global = torch.arange(tokens) < 64
    cross = Dense(is_global) | is_global[:, None]
    padding = Padding(torch.tensor([tokens * 5 // 8]))
    far = Window(tokens * 3 // 10, tokens * 3 // 10)
    return {
        "Causal & Padding": Causal() & padding,
        "Blocks": Blocks(grid, 64),
        "Blocks & Causal": Blocks(grid, 64) & Causal(),
        "Window | cross": WINDOW | cross,
        "Causal & ~Window": Causal() & ~far,
        "Packed | cross": packed | cross,
        "Padding": padding,
        "Dense, of blocks": Dense(grid.repeat_interleave(64, 0).repeat_interleave(64, 1)),
        "Causal & Packed": Causal() & packed,
        "Window & Padding": WINDOW & padding,
        "Window & Packed": WINDOW & packed,
        "Window": WINDOW,
        "Packed": packed,
    }


def share_of_blocks(mask: attnkit.core.masks.Mask, tokens: int) -> float:
    """Return the share of 64 × 64 blocks that the mask touches."""
    touched = 0
    for runs in mask.plan(QueryBlocks.of_size(64, tokens, tokens)).simplified().rows():
        blocks = {block for start, end, _ in runs for block in range(start // 64, -(-end // 64))}
        touched += len(blocks)
    return touched / (-(-tokens // 64)) ** 2


def processor_seconds(function) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def compositions(pairs: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for tokens in (4096, 16_384):
        inputs = tensors(4, tokens, 64)
        full = step(attention(), inputs)
        rows = []
        for name, mask in masks_of(tokens).items():
            run = step(attention(mask=mask), inputs)
            run()
            full()
            rounds = pairs if tokens == 4096 else max(1, pairs // 2)
            ratios = [processor_seconds(run) / processor_seconds(full) for _ in range(rounds)]
            share = share_of_blocks(mask, tokens)
            rows.append(
                {
                    f"{tokens:,} tokens": name,
                    "share of blocks": f"{share:.3f}",
                    "share of the time": f"{median(ratios):.3f}",
                    "range": f"{min(ratios):.3f}–{max(ratios):.3f}",
                    "asked": f"{1.4 * share + 0.03:.3f}",
                }
            )
        print(table(rows))
    torch.set_num_threads(threads)


def patterns(pairs: int) -> None:
    tokens, blocks = 16_384, 256
    generator = torch.Generator().manual_seed(0)
    is_global = torch.arange(tokens) < 64
    longformer = Window(256, 256) | is_global | is_global[:, None]
    drawn = torch.rand(blocks, blocks, generator=generator).topk(3).indices
    grid = torch.zeros(blocks, blocks, dtype=torch.bool).scatter_(1, drawn, True)
    bigbird = Window(96, 96) | is_global | is_global[:, None] | Blocks(grid, 64)
    inputs = tensors(4, tokens, 64)
    programs = {
        "Longformer": step(attention(mask=longformer), inputs),
        "BigBird": step(attention(mask=bigbird), inputs),
        "full flash": step(attention(), inputs),
    }
    times = alternate(programs, pairs, warm_up=1)
    for name in ("Longformer", "BigBird"):
        print(table([row(f"{name}, 16,384 tokens", times, name, "full flash")]))


def plan(pairs: int) -> None:
    tokens = 10**6
    packed, padding = Packed(torch.full((1000,), 1000)), Padding(torch.tensor([700_000]))
    window = Window(256, 256)
    masks = {
        "Causal": Causal(),
        "Window": window,
        "Packed": packed,
        "Padding": padding,
        "Causal & Packed": Causal() & packed,
        "Causal & Padding": Causal() & padding,
        "Window & Packed": window & packed,
        "Window & Padding": window & padding,
        "Packed & Padding": packed & padding,
        "Causal & ~Window": Causal() & ~window,
        "Causal & Packed & Padding": Causal() & packed & padding,
    }
    rows = []
    for name, mask in masks.items():
        seconds = []
        for _ in range(4 * pairs):
            start = time.perf_counter()
            found = mask.plan(QueryBlocks.of_size(64, tokens, tokens)).simplified()
            seconds.append(time.perf_counter() - start)
        size = found.ends.nbytes + found.kinds.nbytes
        share = (np.diff(found.ends, prepend=0) * (found.kinds != NONE)).sum()
        rows.append(
            {
                "1,000,000 tokens": name,
                "time": f"{1e3 * median(seconds):.1f} ms",
                "memory": f"{size / 1e6:.1f} MB",
                "keys read": f"{share / found.ends[-1]:.4f}",
            }
        )
    print(table(rows))


def sinks(pairs: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    inputs, sink = tensors(4, 4096, 64), torch.randn(4, requires_grad=True)
    packed = Packed(packed_lengths(4096, torch.Generator().manual_seed(0)))
    masks = {"none": None, "Causal": Causal(), "Window": WINDOW, "Packed": packed}
    for name, mask in masks.items():

        def with_sink(query, key, value, sink, mask=mask):
            return attnkit.attend(query, key, value, sink=sink, mask=mask)

        programs = {
            "with a sink": step(with_sink, [*inputs, sink]),
            "without": step(attention(mask=mask), inputs),
        }
        times = alternate(programs, 4 * pairs, clock=time.process_time)
        print(table([row(name, times, "without", "with a sink")]))
    torch.set_num_threads(threads)


def exactly(**options):
    def run(*inputs):
        with attnkit.exact():
            return attnkit.attend(*inputs, **options)

    return run


def exact(pairs: int) -> None:
    lengths = torch.randint(64, 513, (16,), generator=torch.Generator().manual_seed(0))
    tokens, longest = int(lengths.sum()), int(lengths.max())
    causal, packed, padding = Causal(), Packed(lengths), Padding(lengths)
    cases = {
        "8 items × 4 heads × 256 tokens": (None, tensors(4, 256, 64, batch=8)),
        "4 × 8 × 1,024, causal": (causal, tensors(8, 1024, 64, batch=4)),
        f"16 packed, {tokens:,} tokens": (packed, tensors(4, tokens, 64)),
        "the same, causal": (packed & causal, tensors(4, tokens, 64)),
        f"16 padded to {longest} tokens": (padding, tensors(4, longest, 64, batch=16)),
        "the same, causal ": (padding & causal, tensors(4, longest, 64, batch=16)),
        "64 × 8 × 16 (small)": (None, tensors(8, 16, 64, batch=64)),
    }
    rows = []
    for name, (mask, inputs) in cases.items():
        programs = {
            "exact": step(exactly(mask=mask), inputs),
            "outside": step(attention(mask=mask), inputs),
        }
        times = alternate(programs, 5 * pairs)
        rows.append(row(name, times, "outside", "exact"))
    print(table(rows))


FIGURES = {
    "memory": memory,
    "grid": grid,
    "packed": packed,
    "line": line,
    "compositions": compositions,
    "patterns": patterns,
    "plan": plan,
    "sinks": sinks,
    "exact": exact,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=[*FIGURES])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy")
    parser.add_argument("--peak", help="a mask, whose peak memory alone is printed")
    arguments = parser.parse_args()
    if arguments.peak:
        return peak(arguments.peak)
    print(machine())
    print("load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))
    with busy(arguments.busy):
        for figure in arguments.figures:
            FIGURES[figure](arguments.pairs)
    return None


if __name__ == "__main__":
    main()
