"""Packed sequences on CUDA, all at once, by torch's kernel for sequences of various lengths."""

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
)
from attnkit.core.kernels.packed import PackedKernel, packed_reasons, packing_pays, take_apart
from attnkit.core.kernels.sdpa import capability_reasons, half_precision_reasons

LARGEST_DIM = 256


class VarlenKernel(Backend):
    """`Packed`, alone or with the masks that count within its sequences, by
    `torch.nn.attention.varlen`."""

    name = "varlen"
    needs_mask = PackedKernel.needs_mask

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from device_reasons(inputs, "cuda")
        yield from packed_reasons(inputs)
        packed, inside, _ = take_apart(inputs)
        if len(packed) != 1 or not inputs.query.is_cuda:
            return
        yield from empty_reasons(inputs)
        yield from dot_product_reasons(inputs)
        yield from half_precision_reasons(inputs)
        yield from capability_reasons(inputs)
        dim = max(inputs.dot_dim or 0, inputs.value.shape[3])
        if dim > LARGEST_DIM:
            yield f"needs a head_dim of at most {LARGEST_DIM}, got {dim}"
        if inputs.bias is not None:
            yield "cannot read a bias"
        yield from dropout_reasons(inputs)
        if inside and packed[0].key_lengths is not None:
            yield "aligns Causal and Window at the end of sequences, got key_lengths"
        if not torch.compiler.is_compiling() and bool((packed[0].both_lengths[1] < 1).any()):
            yield "promises nothing for sequences without keys, got one"

    def pays(self, inputs: Inputs) -> bool:
        return packing_pays(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        from torch.nn.attention import varlen

        (packed,), inside, _ = take_apart(inputs)
        inputs = inputs.as_scaled_dot()
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
