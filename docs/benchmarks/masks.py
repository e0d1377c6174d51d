"""Windows and packed sequences against full and padded attention, forward + backward.

    python docs/benchmarks/masks.py [line] [memory] [grid] [packed] [--busy 1]

- line: a window of ±128 at 32,768 tokens, 4 heads × 64, against full flash in the same run, and
  against itself at half the tokens;
- memory: the peak memory of that beyond its inputs, in a process of its own, against the size of
  query, key and value;
- grid: a 2-D window of radius 3 on 64 × 64, 4 heads × 32, against flash with the boolean mask;
- packed: 64 sequences of lengths 16 to 512, 4 heads × 64, against SDPA on the padded batch.

Programs alternate; a ratio is the median of the rounds' ratios. On a machine that others use too,
set OMP_WAIT_POLICY=passive: threads that spin while they wait hold up these short parallel regions.
"""

import argparse
import os
import subprocess
import sys

import torch
from measure import alternate, busy, machine, peak_memory, table
from torch.nn import functional as F

import attnkit

WINDOW = attnkit.Window(128, 128)


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


def memory() -> None:
    inputs = tensors(4, 32_768, 64)
    size = 3 * inputs[0].numel() * 4
    extra = peak_memory(step(attention(mask=WINDOW), inputs))
    print(f"window ±128 at 32,768 tokens: peak extra memory {extra / 1e6:.0f} MB, "
          f"{extra / size:.2f} × query, key and value; their gradients are 1 ×")  # fmt: skip


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=["memory", "grid", "packed", "line"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy")
    arguments = parser.parse_args()
    if arguments.figures == ["memory"]:
        return memory()
    print(machine())
    print("load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))
    with busy(arguments.busy):
        for figure in arguments.figures:
            if figure == "memory":
                subprocess.run([sys.executable, __file__, "memory"], check=True)
            else:
                {"line": line, "grid": grid, "packed": packed}[figure](arguments.pairs)
    return None


if __name__ == "__main__":
    main()
