"""Linear attention and the delta rule at 16,384 tokens, forward + backward.

    python docs/benchmarks/linear.py [causal] [everywhere] [delta] [doubling] [memory]

- causal: causal linear attention, 4 heads × 64, against torch's flash causal, and against the same
  formula by cumulative sums, which hold a head_dim × value_dim matrix for each token;
- everywhere: the same without a mask, against flash and against the formula in plain torch;
- delta: the delta rule in chunks against the recurrence token by token at 1,024 tokens, and at
  16,384 tokens against flash causal;
- doubling: each causal one against itself at half the tokens;
- memory: the peak memory beyond the inputs, in a process of its own, against the size of query,
  key and value. With MALLOC_MMAP_THRESHOLD_=65536 it is what is held, without what the allocator
  keeps besides.

Programs alternate; a ratio is the median of the rounds' ratios. On a machine that others use too,
set OMP_WAIT_POLICY=passive: threads that spin while they wait hold up these short parallel regions.
"""

import argparse
import os
import subprocess
import sys
from functools import partial

import torch
from measure import alternate, machine, peak_memory, table
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit

HEADS, DIM, TOKENS = 4, 64, 16_384


def tensors(tokens: int = TOKENS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]


def with_beta(tokens: int = TOKENS) -> list[torch.Tensor]:
    query, key, value = tensors(tokens)
    key = F.normalize(key.detach(), dim=-1).requires_grad_()
    return [query, key, value, torch.rand(1, HEADS, tokens, requires_grad=True)]


def step(function, inputs):
    output_gradient = torch.randn_like(inputs[2])

    def run():
        return torch.autograd.grad(function(*inputs), inputs, output_gradient)

    return run


def linear(query, key, value, causal):
    mask = attnkit.Causal() if causal else None
    return attnkit.attend(query, key, value, mask=mask, normalizer="linear", backend="linear")


def flash(query, key, value, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def plain(query, key, value, causal):
    query, key = F.elu(query) + 1, F.elu(key) + 1
    if not causal:
        total = query @ key.sum(dim=2)[..., None]
        return query @ (key.transpose(-2, -1) @ value) / total
    memory = (key[..., None] * value[..., None, :]).cumsum(dim=2)
    total = (query * key.cumsum(dim=2)).sum(dim=-1, keepdim=True)
    return (query[..., None, :] @ memory)[..., 0, :] / total


def delta(query, key, value, beta):
    return attnkit.delta_rule(query, key, value, beta)[0]


def recurrence(query, key, value, beta):
    memory = query.new_zeros(1, HEADS, DIM, DIM)
    outputs = []
    for q, k, v, b in zip(*(t.unbind(2) for t in (query, key, value, beta)), strict=True):
        missing = v - (k[..., None, :] @ memory)[..., 0, :]
        memory = memory + k[..., None] * (b[..., None] * missing)[..., None, :]
        outputs.append((q[..., None, :] @ memory)[..., 0, :])
    return torch.stack(outputs, dim=2)


def row(what: str, times, ours: str, theirs: str) -> dict[str, str]:
    ratios = [a / b for a, b in zip(times.seconds[theirs], times.seconds[ours], strict=True)]
    return {
        "what": what,
        "ours": f"{ours}, {1e3 * times.median(ours):.0f} ms",
        "against": f"{theirs}, {1e3 * times.median(theirs):.0f} ms",
        "ratio": f"{times.ratio(theirs, ours):.1f} × ({min(ratios):.1f}–{max(ratios):.1f})",
    }


def compare(what: str, inputs, rounds: int, **functions) -> list[dict[str, str]]:
    """Return a row for each function except the first, which is attnkit's."""
    programs = {name: step(function, inputs) for name, function in functions.items()}
    times = alternate(programs, rounds, warm_up=1)
    ours, *others = programs
    return [row(what, times, ours, theirs) for theirs in others]


def against_others(rounds: int, *, causal: bool) -> list[dict[str, str]]:
    functions = {"linear": linear, "flash": flash, "plain": plain}
    what = "causal" if causal else "everywhere"
    bound = {name: partial(function, causal=causal) for name, function in functions.items()}
    return compare(what, tensors(), rounds, **bound)


def delta_rule(rounds: int) -> list[dict[str, str]]:
    rows = compare("1,024 tokens", with_beta(1024), rounds, delta=delta, recurrence=recurrence)
    inputs = with_beta()
    programs = {
        "delta": step(delta, inputs),
        "flash": step(partial(flash, causal=True), inputs[:3]),
    }
    times = alternate(programs, rounds, warm_up=1)
    return [*rows, row("16,384 tokens", times, *programs)]


def doubling(rounds: int) -> list[dict[str, str]]:
    rows = []
    for name, function, make in (
        ("linear", partial(linear, causal=True), tensors),
        ("delta", delta, with_beta),
    ):
        programs = {
            f"{tokens:,} tokens": step(function, make(tokens)) for tokens in (TOKENS, 2 * TOKENS)
        }
        rows.append(row(name, alternate(programs, 3 * rounds), *programs))
    return rows


def memory() -> None:
    inputs = with_beta()
    programs = {
        "linear, causal": step(partial(linear, causal=True), inputs[:3]),
        "linear, everywhere": step(partial(linear, causal=False), inputs[:3]),
        "delta rule": step(delta, inputs),
    }
    size = 3 * inputs[0].numel() * 4
    for name, program in programs.items():
        extra = peak_memory(program)
        print(f"{name}: {extra / 1e6:.0f} MB, {extra / size:.2f} × query, key and value; "
              "output and gradients are 1.33 ×")  # fmt: skip


FIGURES = {
    "causal": partial(against_others, causal=True),
    "everywhere": partial(against_others, causal=False),
    "delta": delta_rule,
    "doubling": doubling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=[*FIGURES, "memory"])
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.figures == ["memory"]:
        return memory()
    print(machine())
    print("load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))
    for figure in arguments.figures:
        if figure == "memory":
            subprocess.run([sys.executable, __file__, "memory"], check=True)
        else:
            print(table(FIGURES[figure](arguments.pairs)))
    return None


if __name__ == "__main__":
    main()
