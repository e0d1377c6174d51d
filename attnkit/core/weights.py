"""The weights of attention on demand, whatever kernel computes the output."""

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, check_inputs, in_high_precision
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.normalizers import Normalizer
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.kinds import Score

Indices = int | slice | Sequence[int] | Annotated[Tensor, "_", int] | None
"""Rows or heads: one index, a slice, several indices, or None for all. Negative indices count from
the end."""

BLOCK_ELEMENTS = 2**24  # scores computed at once: 64 MB in float32


def attention_weights(
    query: Annotated[Tensor, "batch heads queries head_dim"],
    key: Annotated[Tensor, "batch kv_heads keys head_dim"],
    *,
    score: str | Score = "scaled_dot",
    mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
    bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None,
    normalizer: str | Normalizer = "softmax",
    scale: float | None = None,
    sink: Annotated[Tensor, "heads"] | None = None,
    rows: Indices = None,
    heads: Indices = None,
) -> Annotated[Tensor, "batch chosen_heads rows keys"]:
    """Compute the weights of `attend`: softmax_j(score(query_i, key_j) + bias_ij).

    These are the weights before dropout, for the given query rows and heads only. They are computed
    in float32 (float64 if the inputs are), a block of rows at a time, so that beside the result
    only one block of scores is held. They are differentiable.

    Args:
        query, key, score, mask, bias, normalizer, scale, sink: as in `attend`; with a sink, the
            weights of a row sum to less than 1.
        rows: query rows; None: all.
        heads: query heads; None: all.

    Returns:
        The weights, in the dtype of the inputs; a row that may look nowhere is 0.

    Raises:
        IndexError: a row or head does not exist. Otherwise as `attend`.
    """
    inputs = check_inputs(
        query,
        key,
        key,
        score=score,
        mask=mask,
        bias=bias,
        normalizer=normalizer,
        scale=scale,
        sink=sink,
    )
    if isinstance(inputs.mask, Edges) and inputs.mask.has_repeated:
        raise ValueError(
            "mask: expected no duplicate edges; attnkit.edge_weights gives a weight for each"
        )
    row_indices = as_indices("rows", rows, inputs.num_queries, query.device)
    head_indices = as_indices("heads", heads, query.shape[1], query.device)
    exact = of_heads(inputs, head_indices)
    with no_autocast(query):
        blocks = [
            weights_of_rows(exact, block, head_indices).to(inputs.query.dtype)
            for block in row_blocks(exact, row_indices)
        ]
    return torch.cat(blocks, dim=2)


def of_heads(inputs: Inputs, heads: Tensor) -> Inputs:
    """Return the attention of the given query heads in high precision, each with a key and value
    head of its own; bias and mask stay those of all heads."""
    kv_heads = heads // (inputs.query.shape[1] // inputs.key.shape[1])
    return in_high_precision(
        replace(
            inputs,
            query=inputs.query[:, heads],
            key=inputs.key[:, kv_heads],
            value=inputs.value[:, kv_heads],
            score=inputs.score.select(heads),
            normalizer=inputs.normalizer.select(heads),
            sink=None if inputs.sink is None else inputs.sink[heads],
        )
    ).as_scaled_dot()


def row_blocks(
    inputs: Inputs, rows: Tensor, block_elements: int | None = None
) -> tuple[Tensor, ...]:
    """Split the rows into parts with at most `block_elements` scores each, at least one row."""
    per_row = max(1, inputs.query.shape[0] * inputs.query.shape[1] * inputs.num_keys)
    return rows.split(max(1, (block_elements or BLOCK_ELEMENTS) // per_row))


def weights_of_rows(inputs: Inputs, rows: Tensor, heads: Tensor) -> Tensor:
    """Compute the weights [batch, heads, rows, keys]; `inputs` is `of_heads(…, heads)`."""
    bias, allowed = inputs.bias, None
    if bias is not None:
        bias = bias if bias.shape[1] == 1 else bias[:, heads]
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
    if inputs.mask is not None:
        items = torch.arange(len(inputs.query), device=rows.device)
        allowed = inputs.mask.select(items, heads, rows, inputs.num_queries, inputs.num_keys)
    block = replace(inputs, query=inputs.query[:, :, rows], bias=bias)
    return inputs.normalizer.weights(block, allowed)


def of_edges(
    weights: Annotated[Tensor, "edges heads"], rows: Indices, heads: Indices
) -> Annotated[Tensor, "rows chosen_heads"]:
    """Return the weights of the given edges and heads of a graph."""
    row_indices = as_indices("rows", rows, len(weights), weights.device)
    head_indices = as_indices("heads", heads, weights.shape[1], weights.device)
    return weights[row_indices[:, None], head_indices]


def as_indices(name: str, given: Indices, size: int, device: torch.device) -> Tensor:
    """Return the given indices as a tensor of numbers from 0 to size − 1.

    Raises:
        IndexError, TypeError: an index is out of range, or not an integer.
    """
    everything = torch.arange(size, device=device)
    if given is None:
        return everything
    if isinstance(given, slice):
        return everything[given]
    one = hasattr(given, "__index__") and not isinstance(given, Tensor)
    chosen = torch.as_tensor([index(given)] if one else given, device=device)  # type: ignore[arg-type]
    chosen = chosen.long() if chosen.numel() == 0 else chosen
    if chosen.dtype == torch.bool or chosen.is_floating_point() or chosen.ndim != 1:
        raise TypeError(f"{name}: expected an integer, a slice or integers, got {given!r}")
    if len(chosen) and (int(chosen.min()) < -size or int(chosen.max()) >= size):
        raise IndexError(f"{name}: there are {size}, got {given!r}")
    return everything[chosen.long()]
