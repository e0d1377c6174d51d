"""Attention under any mask on the CPU, at the cost of the part that the mask allows.

The mask's plan gives steps of queries and keys. Each step is a call of torch's flash kernel,
without a mask if all keys are seen. Steps of the same queries are joined by their log-sum-exps
(lse):

    lse = log(e^lse₁ + e^lse₂),   output = output₁ · e^(lse₁ − lse) + output₂ · e^(lse₂ − lse)

In the backward each step is given the joined output and lse, so that the gradients of steps add up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    add_sink_,
    are_known,
    bias_gradient_reasons,
    channels_in_order,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    first_channels,
    functorch_reasons,
    refuse_second_derivative,
    sink_gradient,
    unwritten,
    with_channels,
)
from attnkit.core.kernels.block_steps import (
    EVERYWHERE,
    Lane,
    Step,
    Steps,
    Task,
    exact_lanes,
    exact_mask_reasons,
    grid_of,
    lanes_of,
)
from attnkit.core.kernels.compiled_windows import program_pays, window_program
from attnkit.core.kernels.sdpa import flash_cpu, flash_cpu_backward
from attnkit.core.masks.base import as_4d
from attnkit.core.masks.kept import has_values, kept
from attnkit.core.masks.sequences import Packed
from attnkit.core.operators.cpu import TASKS_PAY, is_plain, one_thread_of_torch, run_tasks
from attnkit.core.operators.precision import EXACT, cast_bias, laid_out, wide

PAYS = 2**22  # products of channels of a full matrix; with fewer, no plan is made
VECTORS = 64  # numbers, a multiple of those that torch's loops compute at once
MOST_WIDTH = 1024  # numbers of a token, in all heads and items of a call
DEAD = -1e30  # the lse of a row that sees nothing: e^(−∞ − DEAD) is 0, and −∞ − −∞ cannot occur


class BlockSparse(Backend):
    """The kernel for any mask, in time linear in its blocks of queries × keys that are not
    empty."""

    name = "block_sparse"
    has_sink = True
    is_exact = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        if torch.compiler.is_compiling():
            if grid_of(inputs.mask) is None:
                yield from _program_reasons(inputs)
        elif inputs.query.is_cpu and not has_values(inputs.query.device):
            yield "reads the mask's tensors, which have no values while a program is traced"
        yield from device_reasons(inputs, "cpu")
        yield from empty_reasons(inputs)
        yield from dot_product_reasons(inputs)
        yield from functorch_reasons()
        yield from bias_gradient_reasons(inputs)
        yield from exact_mask_reasons(inputs) if EXACT.get() else dropout_reasons(inputs)

    def pays(self, inputs: Inputs) -> bool:
        if torch.compiler.is_compiling():
            return program_pays(inputs)
        if EXACT.get():
            return True
        batch, num_heads, num_queries, dim = inputs.query.shape
        full = batch * num_heads * dim * num_queries * inputs.num_keys
        if inputs.mask is None or inputs.is_causal:  # flash computes these without a tensor
            return False
        return full >= PAYS and _cost(inputs) < full

    def share(self, inputs: Inputs) -> float | None:
        if inputs.mask is None or torch.compiler.is_compiling():
            return None
        lanes = steps_of(inputs).lanes
        pairs = sum(
            step.size * step.num_keys
            for lane in lanes
            for task in lane.tasks
            for step in task.steps
        )
        return pairs / (len(lanes) * inputs.num_queries * inputs.num_keys)

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        if torch.compiler.is_compiling():
            return window_program(inputs)
        if inputs.mask is None:
            inputs = replace(inputs, mask=EVERYWHERE)
        value_dim, dtype = inputs.value.shape[3], inputs.query.dtype
        dim = max(inputs.query.shape[3], value_dim)
        query, key, value = (
            with_channels(tensor, dim) for tensor in (inputs.query, inputs.key, inputs.value)
        )
        lay = laid_out if EXACT.get() else channels_in_order
        query, key, value = map(lay, (query, key, value))
        sink = None if inputs.sink is None else inputs.sink[:, None, None]
        output = _Attention.apply(query, key, value, sink, inputs)
        return first_channels(output, value_dim).to(dtype)


def _program_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield the reasons why a program cannot compute the mask, which is not a window on a grid."""
    lower, upper = None, None
    if inputs.mask is not None:
        lower, upper = inputs.mask.band(inputs.num_queries, inputs.num_keys)
    if lower is None or upper is None:
        yield "needs a window that is limited on both sides in a compiled program"
    elif not are_known(inputs.num_queries, inputs.num_keys):
        yield "needs numbers of tokens that are known in an exported program"
    elif any(isinstance(p, Packed) and p.key_lengths is not None for p in inputs.masks):
        yield "needs sequences with as many queries as keys in Packed beside a window"


def steps_of(inputs: Inputs) -> Steps:
    """Return the steps of the inputs' mask, which are kept with it."""
    mask = inputs.mask
    assert mask is not None
    width = inputs.key.shape[1] * max(inputs.query.shape[3], inputs.value.shape[3])
    sizes = inputs.num_queries, inputs.num_keys, width
    is_exact = bool(EXACT.get())

    def make() -> Steps:
        lanes = (exact_lanes if is_exact else lanes_of)(mask, *sizes)
        return Steps(lanes, inputs.num_queries, width, is_exact=is_exact)

    return kept(mask, "_steps", (*sizes, is_exact), inputs.query.device, make)


def _cost(inputs: Inputs) -> int:
    batch, num_heads, _, dim = inputs.query.shape
    cost = 0
    for lane in steps_of(inputs).lanes:
        items = batch if lane.item is None else 1
        heads = num_heads if lane.head is None else 1
        cost += items * lane.cost(heads * dim)
    return cost


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, inputs: Inputs
    ) -> Tensor:
        batch, num_heads, num_queries, dim = query.shape
        # the heads of a token are contiguous, as the output projection reads them
        output = query.new_zeros(batch, num_queries, num_heads, dim).transpose(1, 2)
        lse = query.new_full((batch, num_heads, num_queries), DEAD, dtype=wide(query.dtype))
        steps = steps_of(inputs)
        shares = _shares(inputs, steps, (query, output, lse), (key, value))
        tasks: list[_Function] = [
            partial(share.forward, task) for share in shares for task in share.lane.tasks
        ]
        _run(tasks, query, steps)
        if sink is not None:
            lse = add_sink_(output, lse[..., None], sink)[..., 0]
        ctx.save_for_backward(query, key, value, sink, output, lse)
        ctx.check = unwritten(inputs.mask, {} if inputs.bias is None else {"bias": inputs.bias})
        ctx.inputs, ctx.steps = inputs, steps
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, output, lse = saved = ctx.saved_tensors  # checkpoints give it once
        refuse_second_derivative("block_sparse", *gradients, *saved)
        ctx.check()
        lay = laid_out if ctx.steps.is_exact else channels_in_order
        query, key, value, gradient = map(lay, (query, key, value, gradients[0]))
        rows = query, output, lse, gradient
        # many steps are summed, so the sums are in float32 even if the kernel computes in half
        totals = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        tasks: list[_Function] = []
        shares = _shares(ctx.inputs, ctx.steps, (*rows, totals[0]), (key, value, *totals[1:]))
        for share in shares:
            for task in share.lane.tasks:
                if isinstance(task.keys, slice):
                    tasks += [partial(share.backward, task, step) for step in task.steps]
                else:
                    tasks.append(partial(share.backward_of_gathered, task))
        _run(tasks, query, ctx.steps)
        for_sink = None
        if sink is not None:
            for_sink = sink_gradient(sink, lse[..., None], (output, gradients[0]))
        return *(total.to(query.dtype) for total in totals), for_sink, None


_Function = Callable[[], Callable[[], None] | None]


def _run(tasks: list[_Function], query: Tensor, steps: Steps) -> None:
    """Run the tasks, in threads of our own if that pays."""
    if is_plain(query) and query.numel() * query.shape[2] >= TASKS_PAY:
        run_tasks(tasks)
        return
    with one_thread_of_torch() if steps.is_exact else nullcontext():
        for task in tasks:
            finish = task()
            if finish is not None:
                finish()


def _shares(
    inputs: Inputs, steps: Steps, rows: Sequence[Tensor], keys: Sequence[Tensor]
) -> Iterator["_Share"]:
    """Divide the work into batch items and query heads that are computed together: as many query
    heads as key heads, or one."""
    batch, num_heads = rows[0].shape[:2]
    num_key_heads, _, dim = keys[0].shape[1:]
    groups = num_heads // num_key_heads
    most = max(1, MOST_WIDTH // (num_key_heads * dim))
    for lane in steps.lanes:
        starts = range(0, batch, most) if lane.item is None else [lane.item]
        size = most if lane.item is None else 1
        pairs = [(slice(group, None, groups), slice(None)) for group in range(groups)]
        if lane.head is not None:
            key_head = lane.head // groups
            pairs = [(slice(lane.head, lane.head + 1), slice(key_head, key_head + 1))]
        for start in starts:
            items = slice(start, start + size)
            for heads, key_heads in pairs:
                yield _Share(
                    inputs,
                    steps,
                    lane,
                    items,
                    heads,
                    tuple(tensor[items, heads] for tensor in rows),
                    tuple(tensor[items, key_heads] for tensor in keys),
                )


@dataclass(frozen=True, eq=False)
class _Share:
    """Some batch items and heads, with methods that compute their steps.

    rows: query, output, lse, and in the backward the gradients of output and query, each [items,
    heads, queries, …]; keys: key and value, and in the backward their gradients.
    """

    inputs: Inputs
    steps: Steps
    lane: Lane
    items: slice
    heads: slice
    rows: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]

    def term(self, task: Task, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """Return the term that is added to the scores of a step, [items, heads, queries, keys], the
        bias or −∞ where the mask forbids, and which rows see nothing; each None if not needed."""
        bias, query = self.inputs.bias, self.rows[0]
        if bias is None and not step.is_masked:
            return None, None
        shape = *self.rows[0].shape[:2], step.size, step.num_keys
        name = None if bias is not None or step.likeness is None else (step.likeness, query.dtype)
        if name in self.steps.terms:
            term, dead = self.steps.terms[name]
            return term.expand(shape), dead
        allowed, dead = self.allowed(task, step) if step.is_masked else (None, None)
        term = query.new_zeros(()) if bias is None else self._bias(bias, task, step)
        if allowed is not None:
            term = term.where(allowed, -torch.inf)
        if bias is not None:
            dead = (term == -torch.inf).all(-1)
        if name is not None:
            self.steps.terms[name] = term, dead
        return term.expand(shape), dead

    def _bias(self, bias: Tensor, task: Task, step: Step) -> Tensor:
        for dim, index in enumerate((*self.indices(), *task.tokens(step))):
            if bias.shape[dim] > 1:
                bias = bias.index_select(dim, index)
        return cast_bias(bias, self.rows[0].dtype)

    def allowed(self, task: Task, step: Step) -> tuple[Tensor, Tensor | None]:
        """Return what the mask allows in a step, and which rows see nothing, None if all see."""
        name = step, self.items.start, self.heads.start
        found = self.steps.allowed.get(name)
        if found is not None:
            return found
        mask, (rows, keys) = self.inputs.mask, task.tokens(step)
        assert mask is not None
        items, heads = (
            index[:1] if number == 1 else index
            for index, number in zip(self.indices(), mask.leading, strict=True)
        )
        places = items[:, None, None, None], heads[:, None, None], rows[:, None], keys
        allowed = mask.allows(*places, self.inputs.num_queries, self.inputs.num_keys)
        allowed = as_4d(allowed).expand(-1, -1, step.size, step.num_keys)
        dead = ~allowed.any(-1)
        found = allowed, dead if bool(dead.any()) else None
        if step.likeness is None or self.inputs.bias is not None:
            self.steps.keep(name, *found)
        return found

    def indices(self) -> tuple[Tensor, Tensor]:
        """Return the indices of its batch items and query heads."""
        batch, num_heads = self.inputs.query.shape[:2]
        return torch.arange(batch)[self.items], torch.arange(num_heads)[self.heads]

    def forward(self, task: Task) -> None:
        """Compute output and lse of the queries of a task."""
        query, place, lse = (_taken(tensor, task.queries) for tensor in self.rows)
        key, value = (_taken(tensor, task.keys) for tensor in self.keys)
        output = place if place.dtype == lse.dtype else place.to(lse.dtype)
        for step in task.steps:
            term, dead = self.term(task, step)
            o, s = flash_cpu(
                query.narrow(2, step.start, step.size),
                _side_by_side(key, step.runs),
                _side_by_side(value, step.runs),
                attn_mask=term,
                scale=self.inputs.scale,
            )
            if dead is not None:
                s = s.masked_fill(dead, DEAD)
            out, sums = (part.narrow(2, step.start, step.size) for part in (output, lse))
            if step.joins:
                share, joined = _joined(sums, s)
                out.lerp_(o.to(out.dtype), share.unsqueeze(-1))
                sums.copy_(joined)
            else:
                out.copy_(o)
                sums.copy_(s)
        if isinstance(task.queries, Tensor):
            self.rows[1].index_copy_(2, task.queries, output.to(place.dtype))
            self.rows[2].index_copy_(2, task.queries, lse)
        elif output is not place:
            place.copy_(output)

    def backward(self, task: Task, step: Step) -> Callable[[], None]:
        """Compute the gradients of a step; return a function that adds them to the totals."""
        assert isinstance(task.queries, slice)
        start = task.queries.start + step.start
        of_query, of_key, of_value = self._gradients(task, step, self.rows, start, *self.keys[:2])

        total = self.rows[4].narrow(2, start, step.size)
        if step.is_alone:
            total.copy_(of_query)

        def add() -> None:
            if not step.is_alone:
                total.add_(of_query)
            _add_side_by_side(self.keys[2], step.runs, of_key)
            _add_side_by_side(self.keys[3], step.runs, of_value)

        return add

    def backward_of_gathered(self, task: Task) -> Callable[[], None]:
        """Compute the gradients of all steps of a task whose tokens are gathered, once for all
        steps; return a function that adds them to the totals."""
        rows = [_taken(tensor, task.queries) for tensor in self.rows]
        keys = [_taken(tensor, task.keys) for tensor in self.keys]
        sums = [total.zero_() for total in (rows[4], keys[2], keys[3])]
        for step in task.steps:
            found = self._gradients(task, step, rows, step.start, *keys[:2])
            of_query, of_key, of_value = found
            sums[0].narrow(2, step.start, step.size).add_(of_query)
            _add_side_by_side(sums[1], step.runs, of_key)
            _add_side_by_side(sums[2], step.runs, of_value)

        def add() -> None:
            assert isinstance(task.queries, Tensor)
            assert isinstance(task.keys, Tensor)
            self.rows[4].index_add_(2, task.queries, sums[0])
            self.keys[2].index_add_(2, task.keys, sums[1])
            self.keys[3].index_add_(2, task.keys, sums[2])

        return add

    def _gradients(
        self, task: Task, step: Step, rows: Sequence[Tensor], start: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of query, key and value of a step whose first query is `start`."""
        query, output, lse, gradient = (tensor.narrow(2, start, step.size) for tensor in rows[:4])
        term, _ = self.term(task, step)
        return flash_cpu_backward(
            gradient,
            query,
            _side_by_side(key, step.runs),
            _side_by_side(value, step.runs),
            output,
            lse,
            0.0,
            False,
            attn_mask=term,
            scale=self.inputs.scale,
        )


def _joined(lse: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of `other` in the sum, and the lse of both, [..., rows]. They are padded to
    whole vectors, since torch computes the rest by other code, with other last digits."""
    size = lse.shape[-1]
    lse, other = (F.pad(tensor, (0, -size % VECTORS)) for tensor in (lse, other))
    found = torch.sigmoid(other - lse), torch.logaddexp(lse, other)
    return found[0][..., :size], found[1][..., :size]


def _taken(tensor: Tensor, tokens: slice | Tensor) -> Tensor:
    return tensor[:, :, tokens] if isinstance(tokens, slice) else tensor.index_select(2, tokens)


def _side_by_side(tensor: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    """Concatenate the runs of [items, heads, tokens, dim]; a single run is a view."""
    if len(runs) == 1:
        return tensor.narrow(2, *runs[0])
    return torch.cat([tensor.narrow(2, *run) for run in runs], dim=2)


def _add_side_by_side(total: Tensor, runs: tuple[tuple[int, int], ...], parts: Tensor) -> None:
    if len(runs) == 1:
        total.narrow(2, *runs[0]).add_(parts)
        return
    sizes = [size for _, size in runs]
    for run, part in zip(runs, parts.split_with_sizes(sizes, dim=2), strict=True):
        total.narrow(2, *run).add_(part)
