"""Full spatial attention against the usual non-local block, forward + backward at batch 1, on CPU.

    python docs/benchmarks/spatial.py [time] [memory] [parts]

- time: `SpatialAttention` on a 64 × 64 map with 32 and 64 inner channels of twice as many, against
  1 × 1 convolutions, bmm, softmax, bmm with the same weights;
- memory: the peak memory of each beyond its inputs, each in a process of its own;
- parts: flash with the queries in parts (`core/kernels/sdpa.py`) against flash as it is, over
  numbers of queries, heads and channels.

Programs alternate; a ratio is the median of the rounds' ratios. On a machine that others use too,
set OMP_WAIT_POLICY=passive: threads that spin while they wait hold up these short parallel regions.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from measure import Times, alternate, machine, peak_memory, table
from torch import nn

import attnkit
from attnkit.core.kernels import sdpa

SIDE = 64
INNER = (32, 64)


class NonLocal(nn.Module):
    """The usual block: x + W_out softmax(θ(x)ᵀ φ(x) / √c) g(x)."""

    def __init__(self, layer: attnkit.SpatialAttention) -> None:
        super().__init__()
        attention = layer.attention
        inner = attention.head_dim
        self.scale = inner**-0.5
        weights, biases = (
            p.detach().split(inner) for p in (attention.in_proj.weight, attention.in_proj.bias)
        )
        self.theta, self.phi, self.g = map(_convolution, weights, biases)
        out = attention.out_proj
        self.out = _convolution(out.weight.detach(), out.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta, phi, g = (f(x).flatten(2) for f in (self.theta, self.phi, self.g))
        weights = (torch.bmm(theta.transpose(1, 2), phi) * self.scale).softmax(dim=-1)
        y = torch.bmm(weights, g.transpose(1, 2))
        return x + self.out(y.transpose(1, 2).unflatten(2, x.shape[2:]))


def _convolution(weight: torch.Tensor, bias: torch.Tensor) -> nn.Conv2d:
    convolution = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
    convolution.load_state_dict({"weight": weight[..., None, None].clone(), "bias": bias.clone()})
    return convolution


def blocks(inner: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    ours = attnkit.SpatialAttention(2 * inner, inner_channels=inner, residual="add")
    return {"attnkit": ours, "non-local": NonLocal(ours)}


def step(block: Callable, inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> Callable:
    gradient = torch.randn_like(block(*inputs))

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(block(*inputs), wanted, gradient)

    return run


def step_of(block: nn.Module, inner: int) -> Callable:
    x = torch.randn(1, 2 * inner, SIDE, SIDE, requires_grad=True)
    return step(block, [x], [x, *block.parameters()])


def row(what: str, times: Times, ours: str, theirs: str) -> dict[str, str]:
    ratios = [a / b for a, b in zip(times.seconds[theirs], times.seconds[ours], strict=True)]
    return {
        "what": what,
        ours: f"{1e3 * times.median(ours):.2f} ms",
        theirs: f"{1e3 * times.median(theirs):.2f} ms",
        "ratio": f"{times.ratio(theirs, ours):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})",
    }


def time(rounds: int) -> None:
    rows = []
    for inner in INNER:
        pair = blocks(inner)
        x = torch.randn(1, 2 * inner, SIDE, SIDE)
        torch.testing.assert_close(*(block(x) for block in pair.values()))
        programs = {name: step_of(block, inner) for name, block in pair.items()}
        times = alternate(programs, rounds)
        rows.append(row(f"{SIDE} × {SIDE}, {inner} inner channels", times, *programs))
    print(table(rows))


def memory(inner: int, name: str) -> None:
    print(peak_memory(step_of(blocks(inner)[name], inner)))


def memories() -> None:
    rows = []
    for inner in INNER:
        peaks = {}
        for name in ("attnkit", "non-local"):
            command = [sys.executable, __file__, "--peak", str(inner), name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[name] = int(done.stdout)
        rows.append(
            {"what": f"peak extra memory, {inner} inner channels"}
            | {name: f"{peak / 1e6:.1f} MB" for name, peak in peaks.items()}
            | {"ratio": f"1/{peaks['non-local'] / peaks['attnkit']:.1f}"}
        )
    print(table(rows))


def parts(rounds: int) -> None:
    rows = []
    for tokens, heads, dim in [
        (512, 1, 32), (577, 1, 64), (1024, 1, 64), (2048, 1, 32), (4096, 1, 32), (4096, 1, 64),
        (4096, 1, 256),
    ]:  # fmt: skip
        inputs = [torch.randn(1, heads, tokens, dim, requires_grad=True) for _ in range(3)]
        whole = step(_whole, inputs, inputs)
        programs = {"in parts": step(attnkit.attend, inputs, inputs), "as it is": whole}
        times = alternate(programs, max(rounds, rounds * 1024 // tokens))
        rows.append(row(f"{tokens} queries, {heads} × {dim}", times, *programs))
    print(table(rows))


def _whole(*tensors: torch.Tensor) -> torch.Tensor:
    least, sdpa.LEAST_QUERIES = sdpa.LEAST_QUERIES, sys.maxsize
    try:
        return attnkit.attend(*tensors)
    finally:
        sdpa.LEAST_QUERIES = least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=["time", "memory", "parts"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        return memory(int(arguments.peak[0]), arguments.peak[1])
    print(machine())
    print("load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))
    for figure in arguments.figures:
        if figure == "memory":
            memories()
        else:
            {"time": time, "parts": parts}[figure](arguments.rounds)
    return None


if __name__ == "__main__":
    main()
