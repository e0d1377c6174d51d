"""Sliding windows in linear time and memory: blocks of queries over the keys they can reach.

Each block goes through torch's flash kernel for CPUs, forward and backward, and the gradients of
overlapping runs of keys are added up; `strips` has the geometry.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    are_known,
    bias_gradient_reasons,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    functorch_reasons,
    refuse_second_derivative,
)
from attnkit.core.kernels.sdpa import flash_cpu, flash_cpu_backward
from attnkit.core.kernels.windows.blocks import Chunk, Part, Terms, grid_of, parts, strips
from attnkit.core.kernels.windows.program import program_pays, window_program
from attnkit.core.masks.base import Mask
from attnkit.core.masks.sequences import Packed
from attnkit.core.operators.modes import is_plain
from attnkit.core.precision import wide
from attnkit.core.threads import TASKS_PAY, run_tasks

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
        if torch.compiler.is_compiling():
            return program_pays(inputs)
        width = inputs.key.shape[1] * inputs.query.shape[3]
        sizes = inputs.num_queries, inputs.num_keys
        assert inputs.mask is not None
        cost = sum(
            CALL + width * chunk.num_pairs
            for strip in strips(inputs.mask, *sizes)
            for chunk in strip.chunks(width)
        )
        return cost < width * sizes[0] * sizes[1]

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        if torch.compiler.is_compiling():
            return window_program(inputs)
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
    elif not are_known(inputs.num_queries, inputs.num_keys):
        yield "needs numbers of tokens that are known in an exported program"
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
        jobs = []
        for item, every, where in _items(terms, query, key, scale):
            tensors = query[item, every], key[item], value[item]
            jobs.append((where, tensors, (output[item, every], lse[item, every])))
        _run(_forward, jobs)
        for job in jobs:
            _forward_prefix(*job)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.mask, ctx.bias, ctx.scale = mask, bias, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("window", *gradients, *ctx.saved_tensors)
        query, key, value, output, lse = ctx.saved_tensors
        gradient = _last_contiguous(gradients[0])
        grad_query = torch.empty_like(query)
        # sums of many runs: in float32 where the kernel computes in half precision
        grad_key, grad_value = (torch.zeros_like(t, dtype=lse.dtype) for t in (key, value))
        terms = Terms(ctx.mask, ctx.bias, query, key)
        jobs = []
        for item, every, where in _items(terms, query, key, ctx.scale):
            own = item, every
            tensors = query[own], key[item], value[item], output[own], lse[own]
            totals = grad_query[own], grad_key[item], grad_value[item]
            jobs.append((where, gradient[own], tensors, totals))
        _run(_backward, jobs)
        for job in jobs:
            _backward_prefix(*job)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _run(function: Callable[..., Callable[[], None] | None], jobs: list[tuple[Any, ...]]) -> None:
    """The function for each part of the jobs, in threads of our own where that pays."""
    work = [(job, part) for job in jobs for part in job[0].parts()]
    tasks = [partial(function, part, *job) for job, part in work]
    pairs = (job[0].width * chunk.num_pairs for job, part in work for chunk in part.chunks)
    if is_plain(jobs[0][-1][0]) and sum(pairs) >= TASKS_PAY:
        run_tasks(tasks)
        return
    for task in tasks:
        finish = task()
        if finish is not None:
            finish()


@dataclass(frozen=True, eq=False)
class _Where:
    """A batch item and those of its query heads that have a key head each; what counts for them."""

    item: int
    heads: Tensor
    terms: Terms
    scale: float
    width: int

    def parts(self) -> Iterator[Part]:
        return parts(self.terms, self.width)

    def term(self, part: Part, chunk: Chunk) -> Tensor:
        """The term of a chunk, [count, heads, queries, keys]."""
        term = self.terms.of_chunk(chunk, self.item, self.heads, *part.tokens)
        return term.expand(chunk.count, len(self.heads), -1, -1)

    def prefix(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Who else sees whom, and the term: the grid the prefix, and the prefix everything."""
        grid, terms = grid_of(self.terms.mask), self.terms
        if grid is None or not grid.num_prefix_tokens:
            return
        prefix, everything = slice(0, grid.num_prefix_tokens), slice(0, grid.num_tokens)
        for rows, columns in (slice(prefix.stop, grid.num_tokens), prefix), (prefix, everything):
            if terms.is_shared:
                yield rows, columns, None
                continue
            tokens = (torch.arange(s.start, s.stop, device=terms.device) for s in (rows, columns))
            term = terms.of(self.item, self.heads, *(t[None] for t in tokens))
            yield rows, columns, term.expand(1, len(self.heads), *term.shape[2:])


def _items(
    terms: Terms, query: Tensor, key: Tensor, scale: float
) -> Iterator[tuple[int, slice, _Where]]:
    """Batch items and query heads, as many as there are key heads: one of each group."""
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    groups = num_heads // num_key_heads
    heads = torch.arange(num_heads, device=query.device)
    for item in range(query.shape[0]):
        for group in range(groups):
            every = slice(group, None, groups)
            width = num_key_heads * query.shape[3]
            yield item, every, _Where(item, heads[every], terms, scale, width)


def _forward(
    part: Part, where: _Where, tensors: tuple[Tensor, ...], results: tuple[Tensor, Tensor]
) -> None:
    """Fill output and lse [heads, queries, …] at the queries of one part."""
    output, lse = results
    strip = part.strip
    q, k, v = strip.lines(*tensors)
    is_line = strip.grid is None
    out = output if is_line else torch.empty_like(q)
    sums = lse if is_line else lse.new_empty(q.shape[:2])
    for chunk in part.chunks:
        if chunk.key_size == 0:
            chunk.queries(out).zero_()
            chunk.queries(sums).zero_()
            continue
        term = where.term(part, chunk)
        o, s = flash_cpu(
            chunk.queries(q), chunk.keys(k), chunk.keys(v), attn_mask=term, scale=where.scale
        )
        if not is_line and not where.terms.is_shared:
            s = s.masked_fill((term == -torch.inf).all(-1), -torch.inf)
        chunk.queries(out).copy_(o)
        chunk.queries(sums).copy_(s)
    if not is_line:
        for whole, line in ((output, out), (lse, sums)):
            place = strip.queries(whole)
            place.copy_(line.view(place.shape))


def _forward_prefix(
    where: _Where, tensors: tuple[Tensor, ...], results: tuple[Tensor, Tensor]
) -> None:
    """Add the prefix to the grid's output and lse, and fill the prefix's own."""
    output, lse = results
    query, key, value = tensors
    for rows, columns, term in where.prefix():
        o, s = flash_cpu(
            query[None, :, rows], key[None, :, columns], value[None, :, columns],
            attn_mask=term, scale=where.scale,
        )  # fmt: skip
        if term is not None:
            s = s.masked_fill((term == -torch.inf).all(-1), -torch.inf)
        _merge(output[:, rows], lse[:, rows], o[0], s[0], replace=rows.start == 0)
    if not where.terms.is_shared:
        lse.masked_fill_(lse == -torch.inf, 0.0)


def _backward(
    part: Part,
    where: _Where,
    gradient: Tensor,
    tensors: tuple[Tensor, ...],
    totals: tuple[Tensor, ...],
) -> Callable[[], None]:
    """Fill the query's gradient of one part. Returns what adds to the key's and the value's."""
    query, key, value, output, lse = tensors
    grad_query, grad_key, grad_value = totals
    strip = part.strip
    q, k, v = strip.lines(query, key, value)
    g, out = (strip.queries(t).reshape(q.shape) for t in (gradient, output))
    sums = strip.queries(lse).reshape(q.shape[:2])
    dq = grad_query if strip.grid is None else torch.empty_like(q)
    size = part.keys.stop - part.keys.start
    dk, dv = (total.new_zeros(len(q), size, q.shape[2]) for total in (grad_key, grad_value))
    for chunk in part.chunks:
        if chunk.key_size == 0:
            chunk.queries(dq).zero_()
            continue
        a, b, c = flash_cpu_backward(
            chunk.queries(g),
            chunk.queries(q),
            chunk.keys(k),
            chunk.keys(v),
            chunk.queries(out),
            chunk.queries(sums),
            0.0,
            False,
            attn_mask=where.term(part, chunk),
            scale=where.scale,
        )
        chunk.queries(dq).copy_(a)
        chunk.add_keys(dk, b, part.keys.start)
        chunk.add_keys(dv, c, part.keys.start)
    if strip.grid is not None:
        place = strip.queries(grad_query)
        place.copy_(dq.view(place.shape))

    def add() -> None:
        for total, line in ((grad_key, dk), (grad_value, dv)):
            place = total[:, part.keys] if strip.grid is None else strip.keys(total)
            place.add_(line.view(place.shape))

    return add


def _backward_prefix(
    where: _Where, gradient: Tensor, tensors: tuple[Tensor, ...], totals: tuple[Tensor, ...]
) -> None:
    """Add what the prefix adds to the gradients, and fill the prefix's own."""
    query, key, value, output, lse = tensors
    grad_query, grad_key, grad_value = totals
    for rows, columns, term in where.prefix():
        a, b, c = flash_cpu_backward(
            gradient[None, :, rows], query[None, :, rows],
            key[None, :, columns], value[None, :, columns],
            output[None, :, rows], lse[None, :, rows], 0.0, False,
            attn_mask=term, scale=where.scale,
        )  # fmt: skip
        if rows.start == 0:
            grad_query[:, rows] = a[0]
        else:
            grad_query[:, rows] += a[0]
        grad_key[:, columns] += b[0]
        grad_value[:, columns] += c[0]


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
