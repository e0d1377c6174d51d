"""Packed sequences without padding: each is attended on its own, in slices of the packed row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import Backend, dot_product_reasons, empty_reasons
from attnkit.core.kernels.record import note_kernel
from attnkit.core.masks.base import Mask
from attnkit.core.masks.sequences import Packed
from attnkit.core.normalizers.kinds import Linear, Softmax

PAYS = 2**19  # products query · key that a padded kernel computes in the time a slice costs


class PackedKernel(Backend):
    """`Packed`, alone or with the masks that count within its sequences.

    Each sequence goes to the first kernel that serves it; on CUDA, where its limits allow, all go
    to `torch.nn.attention.varlen` together.

    Args:
        choose: the kernel for the inputs of one sequence.
    """

    name = "packed"
    normalizers = (Softmax, Linear)

    def __init__(self, choose: Callable[[Inputs], Backend]) -> None:
        self.choose = choose

    def reasons(self, inputs: Inputs) -> list[str]:
        packed, _, others = _take_apart(inputs)
        if len(packed) != 1:
            return [f"computes packed sequences, the mask has {len(packed)} Packed"]
        reasons = [f"{type(mask).__name__} does not count within sequences" for mask in others]
        if torch.compiler.is_compiling():
            reasons.append("slices by lengths, which have no values while torch.compile traces")
        return reasons

    def pays(self, inputs: Inputs) -> bool:
        (packed,), _, _ = _take_apart(inputs)
        batch, heads, num_queries, dim = inputs.query.shape
        products = batch * heads * num_queries * inputs.num_keys * dim
        return products >= PAYS * len(packed.lengths)

    def __call__(self, inputs: Inputs) -> Tensor:
        note_kernel(self.name)
        (packed,), inside, _ = _take_apart(inputs)
        if _serves_varlen(inputs, packed, inside):
            return _varlen(inputs.lowered(), packed, inside)
        mask = reduce(and_, inside) if inside else None
        lengths, key_lengths = (lengths.tolist() for lengths in packed.both_lengths)
        # split, whose backward is one concatenation, where each slice would fill a whole gradient
        pieces = zip(
            inputs.query.split(lengths, dim=2),
            inputs.key.split(key_lengths, dim=2),
            inputs.value.split(key_lengths, dim=2),
            _diagonal_blocks(inputs.bias, lengths, key_lengths),
            strict=True,
        )
        outputs = []
        for query, key, value, bias in pieces:
            item = replace(inputs, query=query, key=key, value=value, mask=mask, bias=bias)
            outputs.append(self.choose(item)(item))
        if not outputs:
            return inputs.value.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        return torch.cat(outputs, dim=2)


def _take_apart(inputs: Inputs) -> tuple[list[Packed], list[Mask], list[Mask]]:
    """The packed masks, those that count within their sequences, and the others."""
    packed: list[Packed] = []
    inside: list[Mask] = []
    others: list[Mask] = []
    for part in inputs.masks:
        if isinstance(part, Packed):
            packed.append(part)
        else:
            (inside if part.counts_positions else others).append(part)
    return packed, inside, others


def _diagonal_blocks(
    bias: Tensor | None, lengths: list[int], key_lengths: list[int]
) -> list[Tensor | None]:
    """The part of the bias that each sequence reads."""
    blocks: list[Tensor | None] = [None] * len(lengths)
    if bias is None:
        return blocks
    row = column = 0
    for i, (num_queries, num_keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        block = bias if bias.shape[2] == 1 else bias[:, :, row : row + num_queries]
        blocks[i] = block if block.shape[3] == 1 else block[..., column : column + num_keys]
        row, column = row + num_queries, column + num_keys
    return blocks


def _serves_varlen(inputs: Inputs, packed: Packed, inside: list[Mask]) -> bool:
    """Whether the one kernel of torch for packed sequences can compute it."""
    if not inputs.query.is_cuda or not isinstance(inputs.normalizer, Softmax):
        return False
    if empty_reasons(inputs) or dot_product_reasons(inputs.lowered()):
        return False
    assert inputs.dot_dim is not None
    return (
        inputs.query.dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(inputs.query.device)[0] >= 8
        and max(inputs.dot_dim, inputs.value.shape[3]) <= 256
        and inputs.bias is None
        and inputs.dropout_p == 0
        # it aligns windows at the end of both sequences, and promises nothing for dead rows
        and (not inside or packed.key_lengths is None)
        and int(packed.both_lengths[1].min()) > 0
    )


def _varlen(inputs: Inputs, packed: Packed, inside: list[Mask]) -> Tensor:
    from torch.nn.attention import varlen

    batch, _, num_queries, _ = inputs.query.shape
    value_dim = inputs.value.shape[3]
    dim = -(-max(inputs.query.shape[3], value_dim) // 8) * 8
    rows = [
        F.pad(tensor, (0, dim - tensor.shape[3])).transpose(1, 2).flatten(0, 1)
        for tensor in (inputs.query, inputs.key, inputs.value)
    ]
    cumulative, longest = [], []
    for lengths in packed.both_lengths:
        ends = lengths.to(inputs.query.device).repeat(batch).cumsum(0)
        cumulative.append(F.pad(ends, (1, 0)).to(torch.int32))
        longest.append(int(lengths.max()))
    window = (-1, -1)
    if inside:
        lower, upper = reduce(and_, inside).band(0, 0)
        window = (-1 if lower is None else -lower, -1 if upper is None else upper)
    attention: Any = varlen.varlen_attn
    output = attention(
        *rows, *cumulative, *longest,
        scale=inputs.scale, window_size=window, enable_gqa=inputs.is_grouped,
    )  # fmt: skip
    return output.unflatten(0, (batch, num_queries)).transpose(1, 2)[..., :value_dim]
