"""The scores of `attend` against plain definitions of them: time, memory and error.

    python docs/benchmarks/scores.py

On the CPU in float32. Gaussian, cosine and general at 2,048 tokens, 4 heads × 64, forward and
forward + backward, against their formulas in plain torch. Then the additive score at 1,024 × 1,024
tokens of 64 dimensions, one head, forward + backward, with tanh, with arguments so large that an
exponential would overflow, and with LeakyReLU, and the peak memory each takes beyond its inputs.
Each ratio is the median over alternating pairs.
"""

import argparse

import torch
from measure import alternate, machine, peak_memory, table
from torch.nn import functional as F

import attnkit


def gaussian(query, key, value, bandwidth):
    distance = torch.cdist(query, key)
    return (-0.5 * (distance / bandwidth) ** 2).softmax(dim=-1) @ value


def cosine(query, key, value, temperature):
    query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    return (query @ key.transpose(-2, -1) / temperature).softmax(dim=-1) @ value


def general(query, key, value, weight):
    return (query @ weight @ key.transpose(-2, -1)).softmax(dim=-1) @ value


def additive(query, key, value, vector):
    return ((query[..., None, :] + key[..., None, :, :]).tanh() @ vector).softmax(dim=-1) @ value


def leaky(query, key, value, vector):
    pairs = F.leaky_relu(query[..., None, :] + key[..., None, :, :], 0.2)
    return (pairs @ vector).softmax(dim=-1) @ value


def leaky_relu_score(vector):
    return attnkit.Additive(vector, "leaky_relu", 0.2)


HEADS, DIM = 4, 64
# name, plain definition, our score, its parameter
LOWERED = [
    ("gaussian", gaussian, attnkit.Gaussian, torch.tensor(DIM**0.25)),
    ("cosine", cosine, attnkit.Cosine, torch.tensor(0.1)),
    ("general", general, attnkit.General, torch.randn(DIM, DIM) / DIM),
]
# name, plain definition, our score, factor on the queries
ADDITIVE = [
    ("additive, tanh", additive, attnkit.Additive, 1),
    ("additive, tanh, arguments to ±400", additive, attnkit.Additive, 100),
    ("additive, leaky_relu", leaky, leaky_relu_score, 1),
]


def inputs_of(heads, tokens, *, factor=1):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, tokens, DIM) for _ in range(3))
    return [(factor * query).requires_grad_(), key.requires_grad_(), value.requires_grad_()]


def forward(function, inputs):
    def run():
        with torch.no_grad():
            return [function(*inputs)]

    return run


def step(function, inputs):
    def run():
        output = function(*inputs)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]

    return run


def compare(name, ours, plain, pairs, memory=False):
    """Return a row: the times, their ratio and the largest error relative to the largest number."""
    times = alternate({"ours": ours, "plain": plain}, pairs)
    error = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours(), plain(), strict=True)
    )
    row = {
        "score": name,
        "attend ms": f"{1e3 * times.median('ours'):.0f}",
        "plain ms": f"{1e3 * times.median('plain'):.0f}",
        "faster": f"{times.ratio('plain', 'ours'):.1f} ×",
        "largest error": f"{error:.0e}",
    }
    if memory:
        extra = peak_memory(ours), peak_memory(plain)
        row["attend MB"], row["plain MB"] = (f"{size / 1e6:.0f}" for size in extra)
        row["memory"] = f"1/{extra[1] / extra[0]:.0f}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--additive-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    print(machine())
    rows = []
    for name, plain, score, parameter in LOWERED:
        parameter = parameter.clone().requires_grad_()
        inputs = [*inputs_of(HEADS, arguments.tokens), parameter]

        def ours(query, key, value, parameter, score=score):
            return attnkit.attend(query, key, value, score=score(parameter), backend="flash")

        for pass_, program in (("forward", forward), ("forward + backward", step)):
            programs = program(ours, inputs), program(plain, inputs)
            rows.append(compare(f"{name}, {pass_}", *programs, arguments.pairs))
    print(table(rows))
    rows = []
    for name, plain, score, factor in ADDITIVE:
        vector = (torch.randn(DIM) / 8).requires_grad_()
        inputs = [*inputs_of(1, arguments.additive_tokens, factor=factor), vector]

        def ours(query, key, value, vector, score=score):
            return attnkit.attend(query, key, value, score=score(vector), backend="blockwise")

        programs = step(ours, inputs), step(plain, inputs)
        rows.append(compare(name, *programs, arguments.pairs, memory=True))
    print(table(rows))


if __name__ == "__main__":
    main()
