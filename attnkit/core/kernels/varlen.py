"""Packed sequences on CUDA by torch's kernel for sequences of various lengths."""

from collections.abc import Iterator
from functools import cache, partial, reduce
from inspect import signature
from operator import and_
from typing import Any

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    first_channels,
    multiple_of_8,
    with_channels,
)
from attnkit.core.kernels.sdpa import capability_reasons, half_precision_reasons
from attnkit.core.masks.base import Mask
from attnkit.core.masks.kept import kept
from attnkit.core.masks.sequences import Packed

LARGEST_DIM = 256
PAYS = 2**19  # products of channels that a padded kernel computes in the overhead of a sequence


class VarlenKernel(Backend):
    """The kernel for `Packed`, alone or with masks that count within its sequences, which calls
    `torch.nn.attention.varlen`."""

    name = "varlen"
    needs_mask = "exactly one Packed mask"

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from device_reasons(inputs, "cuda")
        packed, inside, others = take_apart(inputs)
        if inputs.mask is not None and len(packed) != 1:
            yield f"needs {self.needs_mask}, got {len(packed)}"
        for mask in others if packed else ():
            name = type(mask).__name__
            yield f"needs masks that count within sequences beside Packed, got {name}"
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
        if torch.compiler.is_compiling():
            yield "reads lengths, which have no values while torch.compile traces"
        elif min(packed[0].known_lengths[1], default=1) < 1:
            yield "does not support sequences without keys, got one"

    def pays(self, inputs: Inputs) -> bool:
        (packed,), _, _ = take_apart(inputs)
        batch, heads, num_queries, dim = inputs.query.shape
        products = batch * heads * num_queries * inputs.num_keys * dim
        return products >= PAYS * len(packed.lengths)

    def compute(self, inputs: Inputs) -> Tensor:
        from torch.nn.attention import varlen

        (packed,), inside, _ = take_apart(inputs)
        inputs = inputs.as_scaled_dot()
        batch, _, num_queries, _ = inputs.query.shape
        value_dim = inputs.value.shape[3]
        key, value, options = inputs.key, inputs.value, {}
        if inputs.is_grouped:
            if _serves_grouped():
                options["enable_gqa"] = True
            else:
                key, value = inputs.repeated_heads()
        dim = multiple_of_8(max(inputs.query.shape[3], value_dim))
        rows = [
            with_channels(tensor, dim).transpose(1, 2).flatten(0, 1)
            for tensor in (inputs.query, key, value)
        ]
        device = inputs.query.device
        make = partial(_ends, packed, batch, device)
        ends = kept(packed, "_ends", (batch,), device, make)
        longest = map(max, packed.known_lengths)
        window = (-1, -1)
        if inside:
            lower, upper = reduce(and_, inside).band(0, 0)
            window = (-1 if lower is None else -lower, -1 if upper is None else upper)
        attention: Any = varlen.varlen_attn
        output = attention(
            *rows, *ends, *longest, scale=inputs.scale, window_size=window, **options
        )
        output = output.unflatten(0, (batch, num_queries)).transpose(1, 2)
        return first_channels(output, value_dim)


def take_apart(inputs: Inputs) -> tuple[list[Packed], list[Mask], list[Mask]]:
    """Return the `Packed` masks, the masks that count within their sequences, and the others."""
    packed: list[Packed] = []
    inside: list[Mask] = []
    others: list[Mask] = []
    for part in inputs.masks:
        if isinstance(part, Packed):
            packed.append(part)
        else:
            (inside if part.counts_positions else others).append(part)
    return packed, inside, others


def _ends(packed: Packed, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return where sequences begin, and the last one ends, among the rows of all batch items, for
    queries and for keys."""
    ends = (torch.tensor([0, *batch * lengths]).cumsum(0) for lengths in packed.known_lengths)
    return tuple(tensor.to(device, torch.int32) for tensor in ends)


@cache
def _serves_grouped() -> bool:
    """Return whether the kernel supports grouped heads, as since torch 2.12."""
    from torch.nn.attention import varlen

    return "enable_gqa" in signature(varlen.varlen_attn).parameters
