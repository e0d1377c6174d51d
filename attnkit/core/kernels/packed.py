"""Packed sequences without padding: each is attended on its own, in slices of the packed row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import Backend
from attnkit.core.masks.base import Mask
from attnkit.core.masks.sequences import Packed
from attnkit.core.normalizers.kinds import Linear, Softmax

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
        outputs = []
        for query, key, value, bias in pieces:
            item = replace(inputs, query=query, key=key, value=value, mask=mask, bias=bias)
            outputs.append(self.choose(item)(item))
        if not outputs:
            return inputs.value.new_empty(*inputs.query.shape[:3], inputs.value.shape[3])
        return torch.cat(outputs, dim=2)


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
