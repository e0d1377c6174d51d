"""`attend` on the CPU's flash kernel: its overhead, what it gains, and the memory it takes.

    python docs/benchmarks/attend.py

Compares, in one run and alternating, forward + backward at 4,096 tokens, 4 heads × 64, float32:
attend, torch's scaled_dot_product_attention with flash forced, and matmul–softmax–matmul. Then the
peak memory of attend at 16,384 tokens beyond that of its inputs; what surrounds the kernel at the
size of a decoding step (batch 1, 8 heads × 64, 1 query, 196 keys, no gradient); and the peak of
attention with dropout in blocks (batch 96, 8 heads × 32, 1,024 tokens), as a multiple of output and
gradients, with --blocks.
"""

import argparse

import torch
from measure import alternate, machine, peak_memory, table
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkit
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.choose import choose_backend


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


def decoding() -> str:
    """Microseconds of a call at the size of a decoding step, in rounds of 50 calls."""
    query, key, value = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 8, 196, 64)
    inputs = check_inputs(query, key, value)
    masked = check_inputs(query, key, value, mask=attnkit.Padding(torch.tensor([190])))
    programs = {
        "torch's scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            query, key, value
        ),
        "attend": lambda: attnkit.attend(query, key, value),
        "choosing a kernel": lambda: choose_backend(inputs),
        "choosing one for a mask": lambda: choose_backend(masked),
    }
    with torch.no_grad():
        calls = {
            name: lambda program=program: [program() for _ in range(50)]
            for name, program in programs.items()
        }
        times = alternate(calls, 200, warm_up=20)
    base = next(iter(programs))
    return table(
        [
            {
                "program": name,
                "µs": f"{1e6 * times.median(name) / 50:.1f}",
                "to torch's": f"{times.ratio(name, base):.2f}",
            }
            for name in programs
        ]
    )


def blocks() -> str:
    """Peaks of forward and backward with dropout, by one thread."""
    torch.set_num_threads(1)
    shape = 96, 8, 1024, 32
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    kept = 4 * inputs[0].nbytes  # the output and three gradients
    padding = attnkit.Padding(torch.randint(512, 1025, shape[:1]))
    masks = {"Causal()": attnkit.Causal(), "Causal() & Padding": attnkit.Causal() & padding}
    rows = []
    for name, mask in masks.items():

        def both(mask=mask):
            output = attnkit.attend(*inputs, mask=mask, dropout_p=0.1)
            return output, torch.autograd.grad(output.sum(), inputs)

        peak = peak_memory(both)
        rows.append({"mask": name, "peak MB": f"{peak / 1e6:.0f}", "×": f"{peak / kept:.2f}"})
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--blocks", action="store_true", help="attention in blocks, several minutes"
    )
    parser.add_argument("--decoding", action="store_true", help="the size of a decoding step alone")
    arguments = parser.parse_args()
    print(machine())
    print(decoding())
    if arguments.blocks:
        print(blocks())
    if arguments.decoding or arguments.blocks:
        return
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
