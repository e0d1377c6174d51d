"""`attend` on the CPU's flash kernel: its overhead, what it gains, and the memory it takes.

    python docs/benchmarks/attend.py

Compares, in one run and alternating, forward + backward at 4,096 tokens, 4 heads × 64, float32:
attend, torch's scaled_dot_product_attention with flash forced, and matmul–softmax–matmul. Then the
peak memory of attend at 16,384 tokens beyond that of its inputs, in a process of its own.
"""

import argparse

import torch
from measure import alternate, machine, peak_memory, table
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit


def tensors(tokens: int, heads: int = 4, head_dim: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, head_dim, requires_grad=True) for _ in range(3)]


def ours(query, key, value, causal):
    return attnkit.attend(query, key, value, mask=attnkit.Causal() if causal else None)


def torchs(query, key, value, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def plain(query, key, value, causal):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ value


def step(function, inputs, causal):
    def run():
        gradients = torch.autograd.grad(function(*inputs, causal).sum(), inputs)
        return gradients[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    print(machine())
    inputs = tensors(arguments.tokens)
    rows = []
    for causal in (False, True):
        programs = {"attend": ours, "torch flash": torchs, "matmul-softmax-matmul": plain}
        times = alternate(
            {name: step(function, inputs, causal) for name, function in programs.items()},
            arguments.pairs,
        )
        for name in list(programs)[1:]:
            rows.append(
                {
                    "mask": "causal" if causal else "none",
                    "against": name,
                    "attend ms": f"{1e3 * times.median('attend'):.0f}",
                    "its ms": f"{1e3 * times.median(name):.0f}",
                    "speed of attend": f"{times.ratio(name, 'attend'):.2f} ×",
                }
            )
    print(table(rows))
    inputs = tensors(16_384)
    extra = peak_memory(step(ours, inputs, False))
    scores = inputs[0].shape[1] * 16_384**2 * 4
    print(f"peak extra memory at 16,384 tokens: {extra / 1e6:.0f} MB "
          f"(one matrix of scores: {scores / 1e6:,.0f} MB)")  # fmt: skip


if __name__ == "__main__":
    main()
