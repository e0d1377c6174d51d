"""Windows and packed sequences against FlexAttention, flash and torch's varlen by themselves.

Forward + backward in bfloat16. "direct" is torch's own function with the same inputs.
"""

from collections.abc import Callable, Iterator

import torch
from measure import alternate
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen

import attnkit
from attnkit.core.kernels import flex as our_flex
from attnkit.core.masks.base import Mask

HEADS, DIM, ROUNDS = 8, 64, 20


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], object]:
    gradient = torch.randn_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, gradient)


def rows(device: str, _) -> Iterator[dict]:
    if device == "cpu":
        yield {"windows": "needs CUDA: FlexAttention has no backward on CPU"}
        return
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    side, tokens, batch = (
        64,
        16_384,
        8,
    )  # with fewer, starting the kernels takes longer than they do

    def near(_b, _h, query, key):
        return (query - key).abs() <= 128

    def near_on_the_grid(_b, _h, query, key):
        rows_apart = (query // side - key // side).abs()
        return (rows_apart <= 4) & ((query % side - key % side).abs() <= 4)

    cases = {
        f"window ± 128, {tokens} tokens": (tokens, attnkit.Window(128, 128), near),
        f"grid {side} × {side}, radius 4": (
            side * side,
            attnkit.Window2d(side, side, 4, 4),
            near_on_the_grid,
        ),
    }
    for name, (length, mask, function) in cases.items():
        shape = batch, HEADS, length, DIM
        tensors = [
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        blocks = flex.create_block_mask(function, None, None, length, length, device)
        programs = {
            "attnkit": lambda q, k, v, mask=mask: attnkit.attend(q, k, v, mask=mask),
            "flex, direct": lambda q, k, v, blocks=blocks: compiled(q, k, v, block_mask=blocks),
            "flash, everything": F.scaled_dot_product_attention,
        }
        yield compared(name, programs, tensors, "flex, direct")
        yield tables_of_blocks(name, mask, function, tensors[0])
    for name, lengths in (
        ("packed, 128 of 128", [128] * 128),
        ("packed, 16 to 1024", [int(n) for n in torch.linspace(16, 1024, 32)]),
    ):
        yield packed(name, lengths, device)


def tables_of_blocks(name: str, mask: Mask, function: Callable, query: Tensor) -> dict:
    """The time in which a new mask becomes FlexAttention's tables, by us and by torch."""
    length = query.shape[2]

    def ours() -> object:
        our_flex._made.cache_clear()
        return our_flex.block_mask(mask, query, length)

    def theirs() -> object:
        return flex.create_block_mask(function, None, None, length, length, query.device)

    programs = {"attnkit": ours, "create_block_mask": theirs}
    times = alternate(programs, ROUNDS, warm_up=1, synchronize=torch.cuda.synchronize)
    return {
        "attention": f"tables of blocks of {name}",
        "kernel": "–",
        "attnkit, ms": f"{1e3 * times.median('attnkit'):.3f}",
        "others, ms": f"create_block_mask {1e3 * times.median('create_block_mask'):.3f}",
        "speed": f"{times.ratio('create_block_mask', 'attnkit'):.2f} of create_block_mask",
    }


def packed(name: str, lengths: list[int], device: str) -> dict:
    """Rows [tokens, heads, dim] are what varlen reads; ours takes a view of them."""
    total = sum(lengths)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    mask = attnkit.Packed(lengths)
    tensors = [
        torch.randn(total, HEADS, DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def ours(*rows: Tensor) -> Tensor:
        return attnkit.attend(*(row.transpose(0, 1)[None] for row in rows), mask=mask)

    def direct(*rows: Tensor) -> Tensor:
        return varlen.varlen_attn(*rows, ends, ends, max(lengths), max(lengths))

    programs = {"attnkit": ours, "varlen, direct": direct}
    return compared(name, programs, tensors, "varlen, direct")


def compared(name: str, programs: dict, tensors: list[Tensor], peer: str) -> dict:
    with attnkit.record_backends() as record:
        programs["attnkit"](*tensors)
    steps = {who: gradients(program, tensors) for who, program in programs.items()}
    times = alternate(steps, ROUNDS, warm_up=3, synchronize=torch.cuda.synchronize)
    others = {who: f"{1e3 * times.median(who):.3f}" for who in programs if who != "attnkit"}
    return {
        "attention": name,
        "kernel": ", ".join(record.total()),
        "attnkit, ms": f"{1e3 * times.median('attnkit'):.3f}",
        "others, ms": ", ".join(f"{who} {time}" for who, time in others.items()),
        "speed": f"{times.ratio(peer, 'attnkit'):.2f} of {peer}",
    }
