"""Packed sequences without padding: each is attended on its own, in slices of the packed row.

On the CPU, where torch's flash kernel serves them all, each sequence is a task of our own threads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate, compress, pairwise
from math import prod
from operator import and_
from typing import Any

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    first_channels,
    refuse_second_derivative,
    with_channels,
)
from attnkit.core.kernels.sdpa import Flash, flash_cpu, flash_cpu_backward
from attnkit.core.masks.base import Mask
from attnkit.core.masks.sequences import Packed
from attnkit.core.normalizers import Linear, Softmax
from attnkit.core.operators.modes import is_plain
from attnkit.core.precision import wide
from attnkit.core.threads import TASKS_PAY, run_tasks

PAYS = 2**19  # products query · key that a padded kernel computes in the time a slice costs


class PackedKernel(Backend):
    """`Packed`, alone or with the masks that count within its sequences.

    Each sequence goes to the first kernel that serves it.

    Args:
        choose: the kernel for the inputs of one sequence.
    """

    name = "packed"
    needs_mask = "exactly one Packed mask"
    normalizers = (Softmax, Linear)
    has_all_derivatives = True

    def __init__(self, choose: Callable[[Inputs], Backend]) -> None:
        self.choose = choose

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        return packed_reasons(inputs)

    def pays(self, inputs: Inputs) -> bool:
        return packing_pays(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        (packed,), inside, _ = take_apart(inputs)
        mask = reduce(and_, inside) if inside else None
        lengths, key_lengths = packed.known_lengths
        # split, whose backward is one concatenation, where each slice would fill a whole gradient
        pieces = zip(
            inputs.query.split(lengths, dim=2),
            inputs.key.split(key_lengths, dim=2),
            inputs.value.split(key_lengths, dim=2),
            _diagonal_blocks(inputs.bias, lengths, key_lengths),
            strict=True,
        )
        items = [
            replace(inputs, query=query, key=key, value=value, mask=mask, bias=bias)
            for query, key, value, bias in pieces
        ]
        if not items:
            return inputs.value.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        kernels = [self.choose(item) for item in items]
        full = [not item.is_empty for item in items]
        if all(isinstance(k, Flash) for k in compress(kernels, full)) and _tasks_pay(items):
            return _in_tasks(inputs, items)
        return torch.cat([kernel(item) for kernel, item in zip(kernels, items, strict=True)], dim=2)


def packed_reasons(inputs: Inputs) -> Iterator[str]:
    """Why the mask is not of packed sequences whose lengths can be read."""
    packed, _, others = take_apart(inputs)
    if inputs.mask is not None and len(packed) != 1:
        yield f"needs exactly one Packed mask, got {len(packed)}"
    for mask in others if packed else ():
        yield f"needs masks that count within sequences beside Packed, got {type(mask).__name__}"
    if packed and torch.compiler.is_compiling():
        yield "reads lengths, which have no values while torch.compile traces"


def packing_pays(inputs: Inputs) -> bool:
    """Whether a padded kernel would take longer than the sequences one by one."""
    (packed,), _, _ = take_apart(inputs)
    batch, heads, num_queries, dim = inputs.query.shape
    products = batch * heads * num_queries * inputs.num_keys * dim
    return products >= PAYS * len(packed.lengths)


def take_apart(inputs: Inputs) -> tuple[list[Packed], list[Mask], list[Mask]]:
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
    bias: Tensor | None, lengths: Sequence[int], key_lengths: Sequence[int]
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


def _tasks_pay(items: Sequence[Inputs]) -> bool:
    """Whether the sequences, with no mask but Causal, keep our threads equally busy."""
    if not is_plain(items[0].query) or any(item.has_attn_mask for item in items):
        return False
    batch, heads, _, dim = items[0].query.shape
    sizes = [batch * heads * dim * item.num_queries * item.num_keys for item in items]
    return sum(sizes) >= max(TASKS_PAY, torch.get_num_threads() * max(sizes))


def _in_tasks(inputs: Inputs, items: Sequence[Inputs]) -> Tensor:
    inputs = inputs.as_scaled_dot()
    dims = inputs.query.shape[3], inputs.value.shape[3]
    tensors = (with_channels(t, max(dims)) for t in (inputs.query, inputs.key, inputs.value))
    tensors = (t if t.stride(3) == 1 else t.contiguous() for t in tensors)
    output = _Sequences.apply(*tensors, _places(items), items[0].is_causal, inputs.scale)
    return first_channels(output, dims[1])


def _places(items: Sequence[Inputs]) -> list[tuple[slice, slice]]:
    """Where the queries and the keys of each sequence stand; the longest first, no empty ones."""
    sizes = [(item.num_queries, item.num_keys) for item in items]
    rows, columns = (pairwise(accumulate(size, initial=0)) for size in zip(*sizes, strict=True))
    places = [(slice(*row), slice(*column)) for row, column in zip(rows, columns, strict=True)]
    order = sorted(range(len(items)), key=lambda index: -prod(sizes[index]))
    return [places[index] for index in order if prod(sizes[index])]


class _Sequences(torch.autograd.Function):
    """Attention within each sequence; `places`: the slices of its queries and of its keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: Sequence[tuple[slice, slice]],
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        batch, num_heads, num_queries, dim = query.shape
        # heads lie beside each other, as the output projection reads them
        output = query.new_zeros(batch, num_queries, num_heads, dim).transpose(1, 2)
        lse = query.new_empty(batch, num_heads, num_queries, dtype=wide(query.dtype))

        def attend(rows: slice, columns: slice) -> None:
            keys, values = key[:, :, columns], value[:, :, columns]
            for heads in _groups(query, key):
                own = slice(None), heads, rows
                output[own], lse[own] = flash_cpu(
                    query[own], keys, values, 0.0, is_causal, scale=scale
                )

        run_tasks([partial(attend, *place) for place in places])
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.options = places, is_causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("packed", *gradients, *ctx.saved_tensors)
        query, key, value, output, lse = ctx.saved_tensors
        places, is_causal, scale = ctx.options
        gradient = gradients[0] if gradients[0].stride(3) == 1 else gradients[0].contiguous()
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))

        def differentiate(rows: slice, columns: slice) -> None:
            keys, values = key[:, :, columns], value[:, :, columns]
            of_keys, of_values = grad_key[:, :, columns], grad_value[:, :, columns]
            for heads in _groups(query, key):
                own = slice(None), heads, rows
                grad_query[own], for_keys, for_values = flash_cpu_backward(
                    gradient[own], query[own], keys, values, output[own], lse[own],
                    0.0, is_causal, scale=scale,
                )  # fmt: skip
                for total, part in (of_keys, for_keys), (of_values, for_values):
                    total.copy_(part) if heads.start == 0 else total.add_(part)

        run_tasks([partial(differentiate, *place) for place in places])
        return grad_query, grad_key, grad_value, None, None, None


def _groups(query: Tensor, key: Tensor) -> list[slice]:
    """Query heads, as many as there are key heads: one of each that share a key head."""
    groups = query.shape[1] // key.shape[1]
    return [slice(group, None, groups) for group in range(groups)]
