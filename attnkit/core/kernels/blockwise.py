"""Attention by any score in blocks of queries, so that queries × keys memory is never taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import Backend, empty_reasons
from attnkit.core.normalizers.kinds import masked_scores
from attnkit.core.precision import no_autocast

BlockFunction = Callable[[Inputs, "Tensor | None"], tuple[Tensor, ...]]
"""From the inputs of some batch items and query rows, and their mask, to tensors
[batch, heads, rows, ...]."""

# Scores computed at once, of which a step holds several copies: 8 MB each in float32 on the CPU,
# more would be no faster; elsewhere enough to keep a GPU busy.
BLOCK_SCORES = {"cpu": 2**21, "other": 2**24}


def blockwise_attention(inputs: Inputs) -> Tensor:
    """What `reference_attention` computes, one block of batch items and query rows at a time.

    Forward and backward hold the inputs, the output and one block. Computed in float32 (float64
    if the inputs are).
    """
    (output,) = in_blocks(inputs, _attend)
    return output.to(inputs.query.dtype)


def _attend(block: Inputs, allowed: Tensor | None) -> tuple[Tensor]:
    scores, dead = revived(masked_scores(block, allowed, lean=True))
    weights = F.dropout(scores.softmax(dim=-1), block.dropout_p)
    return ((weights @ block.value).masked_fill(dead, 0.0),)


def revived(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The scores where rows that may look nowhere look everywhere, so that their gradients are
    finite, in vain; and which rows these are, [batch, heads, rows, 1]."""
    dead = scores.detach().amax(dim=-1, keepdim=True) == -torch.inf
    return scores.masked_fill(dead, 0.0), dead


def in_blocks(inputs: Inputs, function: BlockFunction) -> tuple[Tensor, ...]:
    """What the function gives for each block, concatenated.

    The backward calls it again for each block (Chen et al., Training Deep Nets with Sublinear
    Memory Cost, 2016), with the same random numbers.
    """
    exact = in_high_precision(inputs)
    with no_autocast(inputs.query):
        key, value = exact.repeated_heads()
        exact = replace(exact, key=key, value=value).as_scaled_dot()
        if torch.compiler.is_exporting():  # sizes that are not known yet have no blocks
            return _call(function, exact, (0, 0), exact, recompute=False)
        items, rows = _block_sizes(exact)
        # one block is all there is: autograd may as well hold it
        is_one = items >= len(exact.query) and rows >= exact.num_queries
        recompute = torch.is_grad_enabled() and not is_one
        by_item = _parts(exact, ("query", "key", "value", "bias"), items, 0)
        return _join(
            (
                _join(
                    (
                        _call(function, block, (index * items, row * rows), exact, recompute)
                        for row, block in enumerate(_parts(item, ("query", "bias"), rows, 2))
                    ),
                    dim=2,
                )
                for index, item in enumerate(by_item)
            ),
            dim=0,
        )


def _call(
    function: BlockFunction, block: Inputs, start: tuple[int, int], whole: Inputs, recompute: bool
) -> tuple[Tensor, ...]:
    def of_block(block: Inputs) -> tuple[Tensor, ...]:
        return function(block, _allowed(block, start, whole))

    if not recompute:
        return of_block(block)
    rng = whole.dropout_p > 0 or whole.normalizer.draws
    return checkpoint(of_block, block, use_reentrant=False, preserve_rng_state=rng)


def _allowed(block: Inputs, start: tuple[int, int], whole: Inputs) -> Tensor | None:
    """The mask of a block whose first batch item and row are `start`."""
    if whole.mask is None:
        return None
    (item, row), (batch, num_heads, num_rows, _) = start, block.query.shape
    if num_rows == whole.num_queries:
        allowed = whole.mask.dense(whole.num_queries, whole.num_keys, block.query.device)
    else:
        rows = torch.arange(row, row + num_rows, device=block.query.device)
        heads = torch.arange(num_heads, device=block.query.device)
        allowed = whole.mask.select(rows, heads, whole.num_queries, whole.num_keys)
    return allowed if allowed.shape[0] == 1 else allowed[item : item + batch]


def _parts(inputs: Inputs, names: Sequence[str], size: int, dim: int) -> list[Inputs]:
    """The inputs with the named tensors split along a dimension, or as they are where they
    broadcast."""
    length = inputs.query.shape[dim]
    num_parts = -(-length // size)
    split: list[Sequence[Any]] = []
    for name in names:
        tensor = getattr(inputs, name)
        if tensor is None or tensor.shape[dim] == 1:
            split.append([tensor] * num_parts)
        else:
            # split rather than sliced: the gradient is then one concatenation
            split.append(tensor.split(size, dim))
    return [
        replace(inputs, **dict(zip(names, tensors, strict=True)))
        for tensors in zip(*split, strict=True)
    ]


def _join(parts: Any, dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True))


def _block_sizes(inputs: Inputs) -> tuple[int, int]:
    """How many batch items and how many query rows make a block."""
    batch, num_heads, num_queries, _ = inputs.query.shape
    most = BLOCK_SCORES["cpu" if inputs.query.is_cpu else "other"]
    rows = min(num_queries, max(1, most // (num_heads * inputs.num_keys)))
    items = min(batch, max(1, most // (num_heads * inputs.num_keys * rows)))
    return items, rows


class Blockwise(Backend):
    """Any score in blocks of queries, computed again in the backward: no queries × keys memory."""

    name = "blockwise"

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        return empty_reasons(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        return blockwise_attention(inputs)
