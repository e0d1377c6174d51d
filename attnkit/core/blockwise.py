"""Attention by any score in blocks of queries, so that queries × keys memory is never taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnkit.core.inputs import Inputs, in_high_precision

__all__ = ["blockwise_attention"]

# Scores computed at once, of which a step holds several copies: 8 MB each in float32 on the CPU,
# more would be no faster; elsewhere enough to keep a GPU busy.
BLOCK_SCORES = {"cpu": 2**21, "other": 2**24}


def blockwise_attention(inputs: Inputs) -> Tensor:
    """What `reference_attention` computes, one block of batch items and query rows at a time.

    The backward computes each block's weights again (Chen et al., Training Deep Nets with
    Sublinear Memory Cost, 2016), dropout included, so that forward and backward hold the inputs,
    the output and one block. Computed in float32 (float64 if the inputs are).
    """
    exact = in_high_precision(inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):
        key, value = exact.repeated_heads()
        exact = replace(exact, key=key, value=value).lowered()
        items, rows = _block_sizes(exact)
        by_item = [
            _parts(tensor, items, 0, len(exact.query))
            for tensor in (exact.query, exact.key, exact.value, exact.bias)
        ]
        output = [
            _rows(exact, query, key, value, bias, index * items, rows)
            for index, (query, key, value, bias) in enumerate(zip(*by_item, strict=True))
        ]
        return torch.cat(output).to(inputs.query.dtype)


def _rows(
    inputs: Inputs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    item: int,
    rows: int,
) -> Tensor:
    """The output of some batch items, the first of them `item`, of all rows."""
    # all there is: autograd may as well hold it
    is_one_block = query.shape[:3] == inputs.query.shape[:3] and rows >= inputs.num_queries
    recompute = torch.is_grad_enabled() and not is_one_block
    output = []
    by_rows = [_parts(tensor, rows, 2, inputs.num_queries) for tensor in (query, bias)]
    for index, (query_rows, bias_rows) in enumerate(zip(*by_rows, strict=True)):
        block = (inputs, query_rows, key, value, bias_rows, item, index * rows)
        if recompute:
            rng = inputs.dropout_p > 0
            attended = checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=rng)
        else:
            attended = _attend(*block)
        output.append(attended)
    return torch.cat(output, dim=2)


def _attend(
    inputs: Inputs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    item: int,
    row: int,
) -> Tensor:
    """The output of one block, whose first batch item and row are `item` and `row`."""
    scores = inputs.score.lean_scores(query, key)
    if bias is not None:
        scores = scores + bias
    allowed = _allowed(inputs, query, item, row)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    # a row that may look nowhere looks everywhere, so that its gradients are finite, in vain
    dead = scores.detach().amax(dim=-1, keepdim=True) == -torch.inf
    weights = F.dropout(scores.masked_fill(dead, 0.0).softmax(dim=-1), inputs.dropout_p)
    return (weights @ value).masked_fill(dead, 0.0)


def _allowed(inputs: Inputs, query: Tensor, item: int, row: int) -> Tensor | None:
    if inputs.mask is None:
        return None
    batch, num_heads, num_rows, _ = query.shape
    if num_rows == inputs.num_queries:
        allowed = inputs.mask.dense(inputs.num_queries, inputs.num_keys, query.device)
    else:
        rows = torch.arange(row, row + num_rows, device=query.device)
        heads = torch.arange(num_heads, device=query.device)
        allowed = inputs.mask.select(rows, heads, inputs.num_queries, inputs.num_keys)
    return allowed if allowed.shape[0] == 1 else allowed[item : item + batch]


def _parts(tensor: Tensor | None, size: int, dim: int, length: int) -> Sequence[Any]:
    """The tensor split along a dimension, or itself for every part where it broadcasts."""
    if tensor is None or tensor.shape[dim] == 1:
        return [tensor] * -(-length // size)
    # split rather than sliced: the gradient is then one concatenation
    return tensor.split(size, dim)


def _block_sizes(inputs: Inputs) -> tuple[int, int]:
    """How many batch items and how many query rows make a block."""
    batch, num_heads, num_queries, _ = inputs.query.shape
    most = BLOCK_SCORES["cpu" if inputs.query.is_cpu else "other"]
    rows = min(num_queries, max(1, most // (num_heads * inputs.num_keys)))
    items = min(batch, max(1, most // (num_heads * inputs.num_keys * rows)))
    return items, rows
