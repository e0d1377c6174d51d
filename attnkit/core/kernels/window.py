"""Sliding windows in linear time and memory: blocks of queries over the keys they can reach.

Each block goes through torch's flash kernel for CPUs, forward and backward, and the gradients of
overlapping runs of keys are added up; `strips` has the geometry.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    bias_gradient_reasons,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    functorch_reasons,
    refuse_second_derivative,
)
from attnkit.core.kernels.window_blocks import Terms, grid_of, strips
from attnkit.core.masks.base import Mask
from attnkit.core.masks.grids import Window2d
from attnkit.core.masks.sequences import Packed
from attnkit.core.precision import wide

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CALL = 2**21  # products query · key that take as long as calling the kernel for one more chunk


class WindowKernel(Backend):
    """`Window` and `Window2d`, beside any other mask, in time linear in the tokens."""

    name = "window"
    needs_mask = "a window"

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        if grid_of(inputs.mask) is None:
            yield from _line_reasons(inputs)
        yield from device_reasons(inputs, "cpu")
        yield from empty_reasons(inputs)
        yield from dot_product_reasons(inputs)
        yield from functorch_reasons()
        yield from dropout_reasons(inputs)
        yield from bias_gradient_reasons(inputs)

    def pays(self, inputs: Inputs) -> bool:
        width = inputs.key.shape[1] * inputs.query.shape[3]
        sizes = inputs.num_queries, inputs.num_keys
        assert inputs.mask is not None
        cost = sum(
            CALL + width * chunk.count * chunk.query_size * chunk.key_size
            for strip in strips(inputs.mask, *sizes)
            for chunk in strip.chunks(width)
        )
        return cost < width * sizes[0] * sizes[1]

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        value_dim = inputs.value.shape[3]
        dim = max(inputs.query.shape[3], value_dim)
        query, key, value = (
            _last_contiguous(t) if t.shape[3] == dim else F.pad(t, (0, dim - t.shape[3]))
            for t in (inputs.query, inputs.key, inputs.value)
        )
        output = _WindowAttention.apply(query, key, value, inputs.mask, inputs.bias, inputs.scale)
        return output[..., :value_dim]


def _line_reasons(inputs: Inputs) -> Iterator[str]:
    """Why the mask is not a window along a line."""
    if inputs.mask is None:
        return
    lower, upper = inputs.mask.band(inputs.num_queries, inputs.num_keys)
    if lower is None and upper is None:
        yield "needs a window, got a mask without one"
    elif lower is None or upper is None:
        yield "needs a window that is limited on both sides"
    elif any(isinstance(p, Packed) and p.key_lengths is not None for p in inputs.masks):
        yield "needs sequences with as many queries as keys in Packed beside a window"


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
        dtype = wide(query.dtype)
        lse = query.new_empty(batch, num_heads, num_queries, dtype=dtype)
        terms = Terms(mask, bias, query, key)
        for item, heads, groups in _items(query, key):
            tensors = (query[item, groups], key[item], value[item])
            _forward(tensors, output[item, groups], lse[item, groups], terms, item, heads, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.bias, ctx.scale = mask, bias, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("window", *gradients, *ctx.saved_tensors)
        query, key, value, output, lse = ctx.saved_tensors
        gradient = _last_contiguous(gradients[0])
        terms = Terms(ctx.mask, ctx.bias, query, key)
        # sums of many runs: in float32 where the kernel computes in half precision
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(t, dtype=lse.dtype) for t in (key, value))
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


def _forward(
    tensors: tuple[Tensor, ...],
    output: Tensor,
    lse: Tensor,
    terms: Terms,
    item: int,
    heads: Tensor,
    scale: float,
) -> None:
    """Fill output and lse [heads, queries, …] of one batch item."""
    query, key, value = tensors
    num_heads, _, dim = query.shape
    for strip in strips(terms.mask, *terms.sizes):
        tokens = strip.tokens(*terms.sizes, terms.device)
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
                attn_mask=term.expand(chunk.count, num_heads, -1, -1),
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
    for rows, columns in _prefix(grid_of(terms.mask)):
        mask = _prefix_term(terms, item, heads, rows, columns)
        o, s = _flash(
            query[None, :, rows], key[None, :, columns], value[None, :, columns],
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        if mask is not None:
            s = s.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        _merge(output[:, rows], lse[:, rows], o[0], s[0], replace=rows.start == 0)
    if not terms.is_shared:
        lse.masked_fill_(lse == -torch.inf, 0.0)


def _backward(
    gradient: Tensor,
    tensors: tuple[Tensor, ...],
    totals: tuple[Tensor, ...],
    terms: Terms,
    item: int,
    heads: Tensor,
    scale: float,
) -> None:
    """Fill the query's gradient of one batch item; add to the key's and the value's."""
    query, key, value, output, lse = tensors
    grad_query, grad_key, grad_value = totals
    num_heads, _, dim = query.shape
    for strip in strips(terms.mask, *terms.sizes):
        tokens = strip.tokens(*terms.sizes, terms.device)
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
                attn_mask=term.expand(chunk.count, num_heads, -1, -1),
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
    for rows, columns in _prefix(grid_of(terms.mask)):
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


def _prefix(grid: Window2d | None) -> Iterator[tuple[slice, slice]]:
    """Who else sees whom: the grid the prefix, and the prefix everything."""
    if grid is not None and grid.num_prefix_tokens:
        yield slice(grid.num_prefix_tokens, grid.num_tokens), slice(0, grid.num_prefix_tokens)
        yield slice(0, grid.num_prefix_tokens), slice(0, grid.num_tokens)


def _prefix_term(
    terms: Terms, item: int, heads: Tensor, rows: slice, columns: slice
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


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
