"""Attention under any mask at the cost of what the mask allows, on the CPU.

The mask's plan gives steps of queries and keys. Each is a call of torch's flash kernel, without a
mask where all keys are seen. Steps of the same queries are joined by the logarithms of their sums:

    lse = log(e^lse₁ + e^lse₂),   output = output₁ · e^(lse₁ − lse) + output₂ · e^(lse₂ − lse)

In the backward each step is given the output and lse of all, so that its gradients just add up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    are_known,
    bias_gradient_reasons,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    first_channels,
    functorch_reasons,
    refuse_second_derivative,
    with_channels,
)
from attnkit.core.kernels.block_steps import Lane, Step, Task, grid_of, lanes_of
from attnkit.core.kernels.sdpa import flash_cpu, flash_cpu_backward
from attnkit.core.kernels.window_program import program_pays, window_program
from attnkit.core.masks.base import as_4d
from attnkit.core.masks.kept import kept
from attnkit.core.masks.sequences import Packed
from attnkit.core.operators.plain import is_plain
from attnkit.core.precision import cast_bias, wide
from attnkit.core.threads import TASKS_PAY, run_tasks

PAYS = 2**22  # products query · key of a full matrix, before which nothing is planned
MOST_WIDTH = 1024  # numbers of a token, in all heads and items of a call
DEAD = -1e30  # the lse of a row that sees nothing: e^(−∞ − DEAD) is 0, and nothing is −∞ − −∞


class BlockSparse(Backend):
    """Any mask, in time linear in the blocks of queries × keys that it does not leave empty."""

    name = "block_sparse"
    needs_mask = "a mask"

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        if torch.compiler.is_compiling() and grid_of(inputs.mask) is None:
            yield from _program_reasons(inputs)
        yield from device_reasons(inputs, "cpu")
        yield from empty_reasons(inputs)
        yield from dot_product_reasons(inputs)
        yield from functorch_reasons()
        yield from dropout_reasons(inputs)
        yield from bias_gradient_reasons(inputs)

    def pays(self, inputs: Inputs) -> bool:
        if torch.compiler.is_compiling():
            return program_pays(inputs)
        batch, num_heads, num_queries, dim = inputs.query.shape
        full = batch * num_heads * dim * num_queries * inputs.num_keys
        return not inputs.is_causal and full >= PAYS and _cost(inputs) < full

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        if torch.compiler.is_compiling():
            return window_program(inputs)
        value_dim = inputs.value.shape[3]
        dim = max(inputs.query.shape[3], value_dim)
        query, key, value = (
            _last_contiguous(with_channels(tensor, dim))
            for tensor in (inputs.query, inputs.key, inputs.value)
        )
        output = _Attention.apply(query, key, value, inputs)
        return first_channels(output, value_dim)


def _program_reasons(inputs: Inputs) -> Iterator[str]:
    """Why a program cannot hold the mask, other than a grid's window."""
    if inputs.mask is None:
        return
    lower, upper = inputs.mask.band(inputs.num_queries, inputs.num_keys)
    if lower is None or upper is None:
        yield "needs a window that is limited on both sides in a compiled program"
    elif not are_known(inputs.num_queries, inputs.num_keys):
        yield "needs numbers of tokens that are known in an exported program"
    elif any(isinstance(p, Packed) and p.key_lengths is not None for p in inputs.masks):
        yield "needs sequences with as many queries as keys in Packed beside a window"


def lanes(inputs: Inputs) -> list[Lane]:
    """The steps of the inputs' mask, kept with it."""
    mask = inputs.mask
    assert mask is not None
    width = inputs.key.shape[1] * max(inputs.query.shape[3], inputs.value.shape[3])
    sizes = inputs.num_queries, inputs.num_keys, width
    return kept(mask, "_lanes", sizes, inputs.query.device, partial(lanes_of, mask, *sizes))


def _cost(inputs: Inputs) -> int:
    batch, num_heads, _, dim = inputs.query.shape
    cost = 0
    for lane in lanes(inputs):
        items = batch if lane.item is None else 1
        heads = num_heads if lane.head is None else 1
        cost += items * lane.cost(heads * dim)
    return cost


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs) -> Tensor:
        batch, num_heads, num_queries, dim = query.shape
        # heads lie beside each other, as the output projection reads them
        output = query.new_zeros(batch, num_queries, num_heads, dim).transpose(1, 2)
        lse = query.new_full((batch, num_heads, num_queries), DEAD, dtype=wide(query.dtype))
        call = _Call(inputs, lanes(inputs), {}, query, key, value, output, lse)
        work = [(own, task) for own in call.shares() for task in own.lane.tasks]
        call.run([partial(call.forward, *each) for each in work])
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.inputs, ctx.lanes, ctx.terms = inputs, call.lanes, call.terms
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("block_sparse", *gradients, *ctx.saved_tensors)
        call = _Call(ctx.inputs, ctx.lanes, ctx.terms, *ctx.saved_tensors)
        call.gradient = _last_contiguous(gradients[0])
        call.grad_query = torch.zeros_like(call.query)
        # sums of many steps: in float32 where the kernel computes in half precision
        call.grad_key, call.grad_value = (
            torch.zeros_like(tensor, dtype=call.lse.dtype) for tensor in (call.key, call.value)
        )
        tasks: list[Callable[[], Callable[[], None] | None]] = []
        for own in call.shares():
            for task in own.lane.tasks:
                if isinstance(task.keys, slice):
                    tasks += [partial(call.backward, own, task, step) for step in task.steps]
                else:
                    tasks.append(partial(call.backward_of_gathered, own, task))
        call.run(tasks)
        dtype = call.key.dtype
        return call.grad_query, call.grad_key.to(dtype), call.grad_value.to(dtype), None


@dataclass(frozen=True, eq=False)
class _Share:
    """Items and query heads that are computed together, as many heads as they have key heads."""

    lane: Lane
    items: slice
    heads: slice
    key_heads: slice

    def of_queries(self, tensor: Tensor, tokens: slice | Tensor) -> Tensor:
        return _taken(tensor[self.items, self.heads], tokens)

    def of_keys(self, tensor: Tensor, tokens: slice | Tensor) -> Tensor:
        return _taken(tensor[self.items, self.key_heads], tokens)


class _Call:
    """The tensors of one call of the kernel, forward or backward, and what computes a step."""

    gradient: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    def __init__(
        self,
        inputs: Inputs,
        lanes: list[Lane],
        terms: dict[tuple[int, ...], tuple[Tensor, Tensor | None]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
    ) -> None:
        assert inputs.mask is not None
        self.mask, self.bias, self.scale = inputs.mask, inputs.bias, inputs.scale
        self.lanes, self.terms = lanes, terms
        self.query, self.key, self.value, self.output, self.lse = query, key, value, output, lse
        self.sizes = query.shape[2], key.shape[2]

    def shares(self) -> Iterator[_Share]:
        batch, num_heads = self.query.shape[:2]
        groups = num_heads // self.key.shape[1]
        most = max(1, MOST_WIDTH // (self.key.shape[1] * self.key.shape[3]))
        for lane in self.lanes:
            starts = range(0, batch, most) if lane.item is None else [lane.item]
            size = most if lane.item is None else 1
            for start in starts:
                items = slice(start, start + size)
                if lane.head is None:
                    for group in range(groups):
                        yield _Share(lane, items, slice(group, None, groups), slice(None))
                else:
                    head, key_head = lane.head, lane.head // groups
                    key_heads = slice(key_head, key_head + 1)
                    yield _Share(lane, items, slice(head, head + 1), key_heads)

    def run(self, tasks: list[Callable[[], Callable[[], None] | None]]) -> None:
        """The tasks, in threads of our own where that pays."""
        batch, num_heads, num_queries, dim = self.query.shape
        if is_plain(self.output) and self.query.numel() * self.sizes[1] >= TASKS_PAY:
            run_tasks(tasks)
            return
        for task in tasks:
            finish = task()
            if finish is not None:
                finish()

    def term(self, own: _Share, task: Task, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the scores of a step, [items, heads, queries, keys], 0 or −∞ where the
        mask says so, and the bias; and which rows see nothing. None where there is nothing."""
        is_masked = step.is_masked and not (step.is_causal and self.bias is None)
        if not is_masked and self.bias is None:
            return None, None
        found = None if step.likeness is None else self.terms.get(step.likeness)
        if found is not None:
            return found
        batch, num_heads = self.query.shape[:2]
        rows, keys = task.tokens(step)
        items, heads = torch.arange(batch)[own.items], torch.arange(num_heads)[own.heads]
        term = torch.zeros((), dtype=self.query.dtype)
        if self.bias is not None:
            term = self.bias
            for dim, index in enumerate((items, heads, rows, keys)):
                if term.shape[dim] > 1:
                    term = term.index_select(dim, index)
            term = cast_bias(term, self.query.dtype)
        if is_masked:
            where = items[:, None, None, None], heads[:, None, None], rows[:, None], keys
            term = torch.where(as_4d(self.mask.allows(*where, *self.sizes)), term, -torch.inf)
        dead = (term == -torch.inf).all(-1)
        term = term.expand(len(items), len(heads), len(rows), len(keys))
        found = term, dead if bool(dead.any()) else None
        if step.likeness is not None and self.bias is None:
            self.terms[step.likeness] = found
        return found

    def forward(self, own: _Share, task: Task) -> None:
        """Fill output and lse at the queries of a task."""
        query = own.of_queries(self.query, task.queries)
        key, value = (own.of_keys(tensor, task.keys) for tensor in (self.key, self.value))
        places = [own.of_queries(tensor, task.queries) for tensor in (self.output, self.lse)]
        is_view = isinstance(task.queries, slice)
        output, lse = places
        if output.dtype != lse.dtype:
            output = output.to(lse.dtype)
        for number, step in enumerate(task.steps):
            term, dead = self.term(own, task, step)
            o, s = flash_cpu(
                query[:, :, step.queries],
                _side_by_side(key, step.keys),
                _side_by_side(value, step.keys),
                0.0,
                step.is_causal and term is None,
                attn_mask=term,
                scale=self.scale,
            )
            if dead is not None:
                s = s.masked_fill(dead, DEAD)
            out, sums = output[:, :, step.queries], lse[:, :, step.queries]
            if any(_overlap(step, before) for before in task.steps[:number]):
                out.lerp_(o.to(out.dtype), torch.sigmoid(s - sums).unsqueeze(-1))
                sums.copy_(torch.logaddexp(sums, s))
            else:
                out.copy_(o)
                sums.copy_(s)
        if isinstance(task.queries, Tensor):
            for whole, part in ((self.output, output), (self.lse, lse)):
                whole[own.items, own.heads].index_copy_(2, task.queries, part.to(whole.dtype))
        elif output is not places[0]:
            places[0].copy_(output)

    def backward(self, own: _Share, task: Task, step: Step) -> Callable[[], None]:
        """Compute the gradients of a step. Returns what adds them to the others."""
        rows = step.queries.start, step.queries.stop
        assert isinstance(task.queries, slice)
        queries = slice(task.queries.start + rows[0], task.queries.start + rows[1])
        key, value = (own.of_keys(tensor, task.keys) for tensor in (self.key, self.value))
        tensors = (self.gradient, self.query, self.output, self.lse)
        gradient, query, output, lse = (own.of_queries(tensor, queries) for tensor in tensors)
        found = self._gradients(own, task, step, gradient, query, key, value, output, lse)

        def add() -> None:
            own.of_queries(self.grad_query, queries).add_(found[0])
            totals = (own.of_keys(total, task.keys) for total in (self.grad_key, self.grad_value))
            for total, part in zip(totals, found[1:], strict=True):
                _add_side_by_side(total, step.keys, part)

        return add

    def backward_of_gathered(self, own: _Share, task: Task) -> Callable[[], None]:
        """The same of all steps of a task, whose tokens are gathered once."""
        tensors = (self.gradient, self.query, self.output, self.lse)
        of_rows = [own.of_queries(tensor, task.queries) for tensor in tensors]
        key, value = (own.of_keys(tensor, task.keys) for tensor in (self.key, self.value))
        sums = [torch.zeros_like(of_rows[1])]
        sums += [torch.zeros_like(tensor, dtype=self.lse.dtype) for tensor in (key, value)]
        for step in task.steps:
            gradient, query, output, lse = (tensor[:, :, step.queries] for tensor in of_rows)
            found = self._gradients(own, task, step, gradient, query, key, value, output, lse)
            sums[0][:, :, step.queries].add_(found[0])
            for total, part in zip(sums[1:], found[1:], strict=True):
                _add_side_by_side(total, step.keys, part)

        def add() -> None:
            own_heads = own.heads, own.key_heads, own.key_heads
            tokens = task.queries, task.keys, task.keys
            totals = self.grad_query, self.grad_key, self.grad_value
            for total, heads, index, part in zip(totals, own_heads, tokens, sums, strict=True):
                total[own.items, heads].index_add_(2, index, part)

        return add

    def _gradients(
        self, own: _Share, task: Task, step: Step, gradient: Tensor, query: Tensor, key: Tensor,
        value: Tensor, output: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        term, _ = self.term(own, task, step)
        return flash_cpu_backward(
            gradient,
            query,
            _side_by_side(key, step.keys),
            _side_by_side(value, step.keys),
            output,
            lse,
            0.0,
            step.is_causal and term is None,
            attn_mask=term,
            scale=self.scale,
        )


def _overlap(step: Step, other: Step) -> bool:
    """Whether queries are of both."""
    a, b = step.queries, other.queries
    return a.start < b.stop and b.start < a.stop


def _taken(tensor: Tensor, tokens: slice | Tensor) -> Tensor:
    return tensor[:, :, tokens] if isinstance(tokens, slice) else tensor.index_select(2, tokens)


def _side_by_side(tensor: Tensor, runs: tuple[slice, ...]) -> Tensor:
    """The runs of [items, heads, tokens, dim]; of one, a view."""
    parts = [tensor[:, :, run] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add_side_by_side(total: Tensor, runs: tuple[slice, ...], parts: Tensor) -> None:
    sizes = [run.stop - run.start for run in runs]
    for run, part in zip(runs, parts.split(sizes, dim=2), strict=True):
        total[:, :, run].add_(part)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
