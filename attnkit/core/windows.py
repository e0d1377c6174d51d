"""Sliding windows in linear time and memory: blocks of queries over the keys they can reach.

Along a line, a block of queries reaches one run of keys, and the runs of the next blocks overlap
it: views of the same memory, never copied. On a grid, strips of columns are such lines, whose
blocks are tiles. Each block goes through torch's flash kernel for CPUs, forward and backward; the
gradients of overlapping runs are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.masks import Causal, Mask, parts
from attnkit.core.sparse_masks import Window, Window2d

__all__ = ["block_size", "grid_window", "line_window", "window_attention"]

TILE = 8  # rows and columns of a tile of queries
CHUNK_ELEMENTS = 2**20  # of keys, counted as often as they are read: what stays in the cache

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Chunk:
    """Blocks of queries and, for each, the run of keys it reaches; one block a step further on."""

    count: int
    query_start: int
    query_size: int
    key_start: int
    key_step: int
    key_size: int

    def queries(self, tensor: Tensor) -> Tensor:
        """The blocks of [heads, tokens, …] as a view [count, heads, query_size, …]."""
        return _blocks(tensor, self.query_start, self.count, self.query_size, self.query_size)

    def keys(self, tensor: Tensor) -> Tensor:
        """The runs of [heads, tokens, dim] as a view [count, heads, key_size, dim]."""
        return _blocks(tensor, self.key_start, self.count, self.key_step, self.key_size)

    def add_keys(self, total: Tensor, gradient: Tensor) -> None:
        """Add gradients of the runs to those of the keys."""
        for start in range(0, self.key_size, self.key_step):
            size = min(self.key_step, self.key_size - start)
            view = _blocks(total, self.key_start + start, self.count, self.key_step, size)
            view.add_(gradient[:, :, start : start + size])


@dataclass(frozen=True)
class Strip:
    """Queries and the keys they reach that form a line, alone or as columns of a grid."""

    num_queries: int
    num_keys: int
    lower: int
    upper: int
    block: int
    key_step: int
    grid: Window2d | None = None
    query_columns: tuple[int, int] = (0, 0)
    key_columns: tuple[int, int] = (0, 0)

    def queries(self, tensor: Tensor) -> Tensor:
        return self._part(tensor, self.query_columns)

    def keys(self, tensor: Tensor) -> Tensor:
        return self._part(tensor, self.key_columns)

    def _part(self, tensor: Tensor, columns: tuple[int, int]) -> Tensor:
        if self.grid is None:
            return tensor
        size = self.grid.height, self.grid.width
        grid = tensor[:, self.grid.num_prefix_tokens :].unflatten(1, size)
        return grid[:, :, slice(*columns)]

    def chunks(self, width: int) -> Iterator[Chunk]:
        """All queries, in blocks; `width` is how many numbers one key has."""
        run = self.key_step + self.upper - self.lower
        last = self.num_queries // self.block
        first_inside = min(last, max(0, -(self.lower // self.key_step)))
        after_inside = max(
            first_inside, min(last, (self.num_keys - run - self.lower) // self.key_step + 1)
        )
        most = max(1, CHUNK_ELEMENTS // (run * width))
        for i in range(first_inside, after_inside, most):
            start = i * self.key_step + self.lower
            count = min(most, after_inside - i)
            yield Chunk(count, i * self.block, self.block, start, self.key_step, run)
        total = -(-self.num_queries // self.block)
        for i in (*range(first_inside), *range(after_inside, total)):
            size = min(self.block, self.num_queries - i * self.block)
            start = max(0, i * self.key_step + self.lower)
            end = min(self.num_keys, i * self.key_step + self.lower + run)
            yield Chunk(1, i * self.block, size, min(start, end), self.key_step, max(0, end - start))


def block_size(reach: int) -> int:
    """Queries of a block: wide runs are shared by more of them."""
    return min(256, max(64, reach // 4 // 32 * 32))


def line_window(inputs: Inputs) -> tuple[int, int] | None:
    """(lower, upper): query i sees none but the keys i + lower … i + upper; None: no such window.

    A limit that is no limit at these sizes is None too.
    """
    if inputs.mask is None:
        return None
    lower, upper = inputs.mask.band(inputs.num_queries, inputs.num_keys)
    return None if lower is None or upper is None else (lower, upper)


def grid_window(inputs: Inputs) -> Window2d | None:
    """The 2-D window among the masks."""
    return next((mask for mask in parts(inputs.mask) if isinstance(mask, Window2d)), None)


def window_attention(inputs: Inputs) -> Tensor:
    """Attention in a window, [batch, heads, queries, value_dim]; a scaled dot product's."""
    value_dim = inputs.value.shape[3]
    dim = max(inputs.query.shape[3], value_dim)
    query, key, value = (
        _last_contiguous(F.pad(tensor, (0, dim - tensor.shape[3])))
        for tensor in (inputs.query, inputs.key, inputs.value)
    )
    assert inputs.mask is not None
    output = _WindowAttention.apply(query, key, value, inputs.mask, inputs.bias, inputs.scale)
    return output[..., :value_dim]


def _strips(mask: Mask, num_queries: int, num_keys: int) -> Iterator[Strip]:
    grid = next((part for part in parts(mask) if isinstance(part, Window2d)), None)
    if grid is None:
        lower, upper = mask.band(num_queries, num_keys)
        assert lower is not None
        assert upper is not None
        size = block_size(upper - lower)
        yield Strip(num_queries, num_keys, lower, max(lower, upper), size, size)
        return
    for left in range(0, grid.width, TILE):
        right = min(grid.width, left + TILE)
        columns = max(0, left - grid.radius_w), min(grid.width, right + grid.radius_w)
        num_columns = columns[1] - columns[0]
        reach = grid.radius_h * num_columns
        yield Strip(
            num_queries=grid.height * (right - left),
            num_keys=grid.height * num_columns,
            lower=-reach,
            upper=reach,
            block=TILE * (right - left),
            key_step=TILE * num_columns,
            grid=grid,
            query_columns=(left, right),
            key_columns=columns,
        )


class _Terms:
    """What is added to the scores of a block: 0 or −inf where the mask says so, and the bias."""

    def __init__(self, mask: Mask, bias: Tensor | None, query: Tensor, key: Tensor) -> None:
        self.mask, self.bias = mask, bias
        self.sizes = query.shape[2], key.shape[2]
        self.dtype, self.device = query.dtype, query.device
        self.num_heads = query.shape[1]
        # where only distances count, all blocks of a chunk have the term of the first
        self.is_shared = bias is None and all(
            isinstance(part, Window | Window2d | Causal) for part in parts(mask)
        )
        if self.is_shared and any(isinstance(part, Window2d) for part in parts(mask)):
            self.is_shared = len(parts(mask)) == 1

    def of(self, batch: int, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """[count, 1 or heads, queries, keys] for token indices [count, queries], [count, keys]."""
        item = torch.full((1, 1, 1, 1), batch, device=self.device)
        head = heads[:, None, None]
        query, key = rows[:, None, :, None], keys[:, None, None, :]
        allowed = self.mask.allows(item, head, query, key, *self.sizes)
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        if self.bias is None:
            return torch.where(allowed, zero, -torch.inf)
        indices = (item, head, query, key)
        sizes = self.bias.shape
        bias = self.bias[tuple(i if n > 1 else i * 0 for i, n in zip(indices, sizes, strict=True))]
        return torch.where(allowed, bias.to(self.dtype), -torch.inf)

    def of_chunk(
        self, chunk: Chunk, batch: int, heads: Tensor, query_tokens: Tensor, key_tokens: Tensor
    ) -> Tensor:
        """The term of a chunk of a strip whose tokens are given."""
        rows = query_tokens[chunk.query_start :].unfold(0, chunk.query_size, chunk.query_size)
        keys = key_tokens[chunk.key_start :].unfold(0, chunk.key_size, chunk.key_step)
        count = 1 if self.is_shared else chunk.count
        return self.of(batch, heads, rows[:count], keys[:count])


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        batch, num_heads, num_queries, dim = query.shape
        # heads lie beside each other, as the output projection reads them
        output = query.new_empty(batch, num_queries, num_heads, dim).transpose(1, 2)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = query.new_empty(batch, num_heads, num_queries, dtype=dtype)
        terms = _Terms(mask, bias, query, key)
        for item, heads, groups in _items(query, key):
            tensors = (query[item, groups], key[item], value[item])
            _forward(tensors, output[item, groups], lse[item, groups], terms, item, heads, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.bias, ctx.scale = mask, bias, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradient = _last_contiguous(gradients[0])
        terms = _Terms(ctx.mask, ctx.bias, query, key)
        # sums of many runs: in float32 where the kernel computes in half precision
        dtype = lse.dtype
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=dtype)
        grad_value = torch.zeros_like(value, dtype=dtype)
        for item, heads, groups in _items(query, key):
            where = item, groups
            tensors = (query[where], key[item], value[item], output[where], lse[where])
            totals = (grad_query[where], grad_key[item], grad_value[item])
            _backward(gradient[where], tensors, totals, terms, item, heads, ctx.scale)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _items(query: Tensor, key: Tensor) -> Iterator[tuple[int, Tensor, slice]]:
    """Batch items and query heads, as many as there are key heads: one of each group."""
    num_heads = query.shape[1]
    groups = num_heads // key.shape[1]
    heads = torch.arange(num_heads, device=query.device)
    for item in range(query.shape[0]):
        for group in range(groups):
            every = slice(group, None, groups)
            yield item, heads[every], every


def _forward(tensors, output, lse, terms, item, heads, scale) -> None:
    query, key, value = tensors
    num_heads, num_queries, dim = query.shape
    for strip in _strips(terms.mask, *terms.sizes):
        tokens = _tokens(strip, terms)
        q = strip.queries(query).reshape(num_heads, -1, dim)
        k, v = (strip.keys(tensor).reshape(num_heads, -1, dim) for tensor in (key, value))
        is_line = strip.grid is None
        out = output if is_line else torch.empty_like(q)
        sums = lse if is_line else lse.new_empty(q.shape[:2])
        for chunk in strip.chunks(num_heads * dim):
            if chunk.key_size == 0:
                chunk.queries(out).zero_()
                chunk.queries(sums).zero_()
                continue
            term = terms.of_chunk(chunk, item, heads, *tokens)
            o, s = _flash(
                chunk.queries(q),
                chunk.keys(k),
                chunk.keys(v),
                attn_mask=_expand(term, chunk, num_heads),
                scale=scale,
            )
            if not is_line and not terms.is_shared:
                s = s.masked_fill((term == -torch.inf).all(-1), -torch.inf)
            chunk.queries(out).copy_(o)
            chunk.queries(sums).copy_(s)
        if not is_line:
            place = strip.queries(output)
            place.copy_(out.view(place.shape))
            place = strip.queries(lse)
            place.copy_(sums.view(place.shape))
    for rows, columns in _prefix(terms):
        term = _prefix_term(terms, item, heads, rows, columns)
        o, s = _flash(
            query[None, :, rows], key[None, :, columns], value[None, :, columns],
            attn_mask=term, scale=scale,
        )  # fmt: skip
        if term is not None:
            s = s.masked_fill((term == -torch.inf).all(-1), -torch.inf)
        _merge(output[:, rows], lse[:, rows], o[0], s[0], replace=rows.start == 0)
    lse.masked_fill_(lse == -torch.inf, 0.0)


def _backward(gradient, tensors, totals, terms, item, heads, scale) -> None:
    query, key, value, output, lse = tensors
    grad_query, grad_key, grad_value = totals
    num_heads, num_queries, dim = query.shape
    for strip in _strips(terms.mask, *terms.sizes):
        tokens = _tokens(strip, terms)
        is_line = strip.grid is None
        g, q, out = (
            strip.queries(tensor).reshape(num_heads, -1, dim)
            for tensor in (gradient, query, output)
        )
        k, v = (strip.keys(tensor).reshape(num_heads, -1, dim) for tensor in (key, value))
        sums = strip.queries(lse).reshape(num_heads, -1)
        dq = grad_query if is_line else torch.empty_like(q)
        dk, dv = (
            total if is_line else torch.zeros_like(k, dtype=total.dtype)
            for total in (grad_key, grad_value)
        )
        for chunk in strip.chunks(num_heads * dim):
            if chunk.key_size == 0:
                chunk.queries(dq).zero_()
                continue
            term = terms.of_chunk(chunk, item, heads, *tokens)
            a, b, c = _flash_backward(
                chunk.queries(g),
                chunk.queries(q),
                chunk.keys(k),
                chunk.keys(v),
                chunk.queries(out),
                chunk.queries(sums),
                0.0,
                False,
                attn_mask=_expand(term, chunk, num_heads),
                scale=scale,
            )
            chunk.queries(dq).copy_(a)
            chunk.add_keys(dk, b)
            chunk.add_keys(dv, c)
        if not is_line:
            place = strip.queries(grad_query)
            place.copy_(dq.view(place.shape))
            for total, part in ((grad_key, dk), (grad_value, dv)):
                place = strip.keys(total)
                place.add_(part.view(place.shape))
    for rows, columns in _prefix(terms):
        a, b, c = _flash_backward(
            gradient[None, :, rows], query[None, :, rows],
            key[None, :, columns], value[None, :, columns],
            output[None, :, rows], lse[None, :, rows], 0.0, False,
            attn_mask=_prefix_term(terms, item, heads, rows, columns), scale=scale,
        )  # fmt: skip
        if rows.start == 0:
            grad_query[:, rows] = a[0]
        else:
            grad_query[:, rows] += a[0]
        grad_key[:, columns] += b[0]
        grad_value[:, columns] += c[0]


def _tokens(strip: Strip, terms: _Terms) -> tuple[Tensor, Tensor]:
    """Which tokens the queries and the keys of a strip are."""
    rows, keys = (torch.arange(size, device=terms.device)[None] for size in terms.sizes)
    return strip.queries(rows).flatten(), strip.keys(keys).flatten()


def _prefix(terms: _Terms) -> Iterator[tuple[slice, slice]]:
    """Who else sees whom: the grid the prefix, and the prefix everything."""
    for part in parts(terms.mask):
        if isinstance(part, Window2d) and part.num_prefix_tokens:
            prefix = part.num_prefix_tokens
            yield slice(prefix, part.num_tokens), slice(0, prefix)
            yield slice(0, prefix), slice(0, part.num_tokens)
            return


def _prefix_term(
    terms: _Terms, item: int, heads: Tensor, rows: slice, columns: slice
) -> Tensor | None:
    if terms.is_shared:
        return None
    indices = (torch.arange(s.start, s.stop, device=terms.device)[None] for s in (rows, columns))
    term = terms.of(item, heads, *indices)
    return term.expand(1, len(heads), *term.shape[2:])


def _merge(output: Tensor, lse: Tensor, other: Tensor, sums: Tensor, replace: bool) -> None:
    """Attention to two sets of keys from attention to each, whose exponentials sum to e^lse."""
    if replace:
        output.copy_(other)
        lse.copy_(sums)
        return
    total = torch.logaddexp(lse, sums)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    share, others = ((part - finite).exp().unsqueeze(-1) for part in (lse, sums))
    output.copy_(output * share + other * others)
    lse.copy_(total)


def _blocks(tensor: Tensor, start: int, count: int, step: int, size: int) -> Tensor:
    run = tensor[:, start : start + (count - 1) * step + size]
    return run.unfold(1, size, step).movedim(1, 0).movedim(-1, 2)


def _expand(term: Tensor, chunk: Chunk, num_heads: int) -> Tensor:
    return term.expand(chunk.count, num_heads, chunk.query_size, chunk.key_size)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
