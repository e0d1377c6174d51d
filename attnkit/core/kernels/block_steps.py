"""The steps in which a mask is computed: blocks of queries, each with the runs of keys that it
reads.

Large blocks read each key for many queries; small blocks read fewer keys in vain. A block of 256
queries reads the long runs of keys that all its queries see. The other keys are read by the block,
or by its parts of 64 queries, whichever costs less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.masks.base import And, Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.grids import Window2d
from attnkit.core.masks.kept import has_values
from attnkit.core.masks.plan import ALL, SOME, QueryBlocks
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window

LARGE, SMALL = 256, 64  # queries of a block
LONG = 256  # least keys of a run that is read without a mask
MOST_KEYS = 1024  # keys of a step: they stay in the cache, as do their rows of gradients
TILE = 8  # rows, and columns, of a tile of queries on a grid
STEP = 2**20  # products of numbers that take as long as the overhead of a step
PER_KEY = 16  # queries whose products take as long as adding up the gradients of a key
GATHER = 8  # queries whose products take as long as copying a key beside others

EVERYWHERE = Window(None, None, "top_left")

Run = tuple[int, int, int]
"""A run of keys: start, end (exclusive), and the plan's answer."""


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the kernel: `size` queries from `start` on, and concatenated runs of keys (first
    key, number of keys)."""

    start: int
    size: int
    runs: tuple[tuple[int, int], ...]
    num_keys: int
    is_masked: bool
    likeness: tuple[int, ...] | None = None
    """A key of the step's mask: steps with the same key have the same mask; None: unknown."""
    joins: bool = False
    """Whether an earlier step reads keys for some of these queries."""
    is_alone: bool = True
    """Whether no other step reads keys for any of these queries."""

    def overlaps(self, other: Step) -> bool:
        """Return whether the steps have queries in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size

    def cost(self, width: int) -> int:
        """Estimate the cost in products of numbers; a token has `width` numbers."""
        per_key = self.size + PER_KEY + (GATHER if len(self.runs) > 1 else 0)
        return STEP + width * self.num_keys * per_key


@dataclass(frozen=True, eq=False)
class Task:
    """All steps of some queries. Queries and keys are slices, or indices of tokens to gather."""

    queries: slice | Tensor
    keys: slice | Tensor
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, queries: slice | Tensor, keys: slice | Tensor, steps: list[Step]) -> Task:
        """Make a task of the steps, with `joins` and `is_alone` set."""
        marked = []
        for number, step in enumerate(steps):
            joins, is_joined = (
                any(map(step.overlaps, some)) for some in (steps[:number], steps[number + 1 :])
            )
            marked.append(replace(step, joins=joins, is_alone=not (joins or is_joined)))
        return cls(queries, keys, tuple(marked))

    def tokens(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the tokens of the queries and of the keys of a step."""
        rows = torch.arange(step.start, step.start + step.size)
        keys = torch.cat([torch.arange(first, first + size) for first, size in step.runs])
        tokens = [
            index + own.start if isinstance(own, slice) else own[index]
            for own, index in ((self.queries, rows), (self.keys, keys))
        ]
        return tokens[0], tokens[1]


@dataclass(frozen=True, eq=False)
class Lane:
    """The tasks of a batch item and a query head; None: of all items or heads."""

    item: int | None
    head: int | None
    tasks: tuple[Task, ...]

    def cost(self, width: int) -> int:
        """Estimate the cost in products of numbers; a token has `width` numbers."""
        return sum(step.cost(width) for task in self.tasks for step in task.steps)


class Steps:
    """The steps of a mask, with caches of the mask in these steps.

    terms: the terms added to the scores, by likeness and dtype, for steps with a likeness.
    allowed: the booleans of other steps, at most as many bytes as the queries have in float32.
    is_exact: whether the bits of a sequence do not depend on what is computed beside it.
    """

    def __init__(
        self, lanes: list[Lane], num_queries: int, width: int, *, is_exact: bool = False
    ) -> None:
        self.lanes, self.is_exact = lanes, is_exact
        self.terms: dict[object, tuple[Tensor, Tensor | None]] = {}
        self.allowed: dict[object, tuple[Tensor, Tensor | None]] = {}
        self._left = 4 * num_queries * width

    def keep(self, name: object, allowed: Tensor, dead: Tensor | None) -> None:
        """Keep the booleans of a step, and which rows see nothing, if there is room."""
        if allowed.numel() <= self._left:
            self._left -= allowed.numel()
            self.allowed[name] = allowed, dead


def lanes_of(mask: Mask, num_queries: int, num_keys: int, width: int) -> list[Lane]:
    """Return the tasks of batch items and heads; one lane serves all whose plans are the same.

    width: the numbers of a token in all heads, or in one head if heads have different plans.
    """
    if grid_of(mask) is not None:
        return [Lane(None, None, tuple(_strips(mask)))]
    large = query_blocks(mask, num_queries, num_keys, LARGE)
    sizes = -(-(large.stop - large.start) // SMALL)
    starts = np.concatenate(
        [np.arange(start, stop, SMALL) for start, stop in zip(large.start, large.stop, strict=True)]
    )
    small = large._replace(start=starts, stop=np.append(starts[1:], num_queries))
    plans = [mask.plan(blocks).simplified() for blocks in (large, small)]
    items, heads = np.broadcast_shapes(*(plan.shape[:2] for plan in plans))
    coarse, fine = (plan.expanded(items, heads, plan.shape[2]).rows() for plan in plans)
    lanes = []
    for item in range(items):
        for head in range(heads):
            builder = _Builder(mask, item, head, num_queries, num_keys, width)
            tasks = []
            ends = small.stop.tolist()
            first = 0
            for start, stop, size in zip(
                *(x.tolist() for x in (large.start, large.stop, sizes)), strict=True
            ):
                parts = [(end, next(fine)) for end in ends[first : first + size]]
                tasks.append(builder.task(start, stop, next(coarse), parts))
                first += size
            lanes.append(
                Lane(item if items > 1 else None, head if heads > 1 else None, tuple(tasks))
            )
    return lanes


def exact_lanes(mask: Mask, num_queries: int, num_keys: int, width: int) -> list[Lane]:
    """Return the lanes of a mask for `attnkit.exact`: each sequence has the same steps as alone,
    since bits depend on the numbers of queries and keys of a step."""
    cuts, parts = _taken_apart(mask)
    if not cuts:
        return lanes_of(mask, num_queries, num_keys, width)
    inside = And(tuple(parts)) if len(parts) > 1 else parts[0] if parts else EVERYWHERE

    @cache
    def alone(mask: Mask, num_queries: int, num_keys: int) -> tuple[Task, ...]:
        if not (num_queries and num_keys):
            return ()
        (lane,) = lanes_of(mask, num_queries, num_keys, width)
        return lane.tasks

    def placed(query: int, key: int, size: int, num_read: int) -> Iterator[Task]:
        """Yield the tasks of a sequence whose first query and key are these."""
        for task in alone(inside, size, num_read):
            yield _moved(task, query, key, num_keys, num_read - size)

    (cut,) = cuts
    if isinstance(cut, Packed):
        tasks: list[Task] = []
        query = key = 0
        for size, num_read in zip(*cut.known_lengths, strict=True):
            tasks += placed(query, key, size, num_read)
            query, key = query + size, key + num_read
        return [Lane(None, None, tuple(tasks))]
    lanes = []
    for item, (first, end) in enumerate(_real(cut, num_keys)):
        if num_queries != num_keys:
            lanes.append(Lane(item, None, tuple(placed(0, first, num_queries, end - first))))
            continue
        tasks = [*placed(first, first, end - first, end - first)]
        for start, stop in ((0, first), (end, num_queries)):  # queries that are padding
            for task in alone(EVERYWHERE, stop - start, end - first):
                task = _moved(task, start, first, num_keys, None)
                if parts:  # a step of padding evaluates the mask itself
                    steps = [replace(step, is_masked=True) for step in task.steps]
                    task = replace(task, steps=tuple(steps))
                tasks.append(task)
        lanes.append(Lane(item, None, tuple(tasks)))
    return lanes


def _real(padding: Padding, num_keys: int) -> Iterator[tuple[int, int]]:
    """Yield the first key of each item that is not padding, and the end of these keys."""
    for length in padding.lengths.tolist():
        if isinstance(length, list):
            first = length.index(True) if True in length else 0
            yield first, first + sum(length)
        else:
            yield 0, min(max(length, 0), num_keys)


def _moved(task: Task, query: int, key: int, num_keys: int, name: int | None) -> Task:
    """Return the task shifted by `query` queries and `key` keys. `name` becomes part of the
    likeness of its steps, which None removes."""
    assert isinstance(task.queries, slice)
    steps = [
        replace(
            step,
            runs=tuple((first + key, size) for first, size in step.runs),
            likeness=None if name is None or step.likeness is None else (*step.likeness, name),
        )
        for step in task.steps
    ]
    queries = slice(task.queries.start + query, task.queries.stop + query)
    return Task(queries, slice(0, num_keys), tuple(steps))


def exact_mask_reasons(inputs: Inputs) -> Iterator[str]:
    """Yield the reasons why the mask cannot be computed with the same bits in any batch."""
    if inputs.mask is None or not has_values(inputs.query.device):
        return
    cuts, inside = _taken_apart(inputs.mask)
    kinds = {type(leaf) for part in inside for leaf in _leaves(part)}
    if Edges in kinds:
        yield "cannot compute each node of Edges by itself"
    if len(cuts) > 1:
        yield "needs one Packed or one Padding, got several"
    elif cuts and not kinds <= {Causal, Window}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {Causal, Window}))
        yield f"needs Causal or Window beside Packed and Padding, got {names}"
    elif kinds & {Packed, Padding}:
        yield "needs Packed and Padding by themselves or in '&', got them in '|' or '~'"
    elif any(part.leading[0] > 1 for part in inside):
        yield "needs a mask that is the same for all items; Padding and Packed may differ"
    for cut in cuts:
        if not isinstance(cut, Padding):
            continue
        if inside and inputs.num_queries != inputs.num_keys:
            yield "needs as many queries as keys for Causal or Window beside Padding"
        real = cut.lengths
        if real.dtype == torch.bool and ((real & ~F.pad(real, (1, 0))[:, :-1]).sum(1) > 1).any():
            yield "needs the real keys of an item beside each other, got padding between them"


def _leaves(mask: Mask) -> Iterator[Mask]:
    parts = getattr(mask, "masks", None)
    if parts is None:
        yield mask
    for part in parts or ():
        yield from _leaves(part)


def _taken_apart(mask: Mask) -> tuple[list[Packed | Padding], list[Mask]]:
    """Return the masks that divide tokens into sequences or hide padding, and the other masks."""
    cuts = [part for part in mask.parts if isinstance(part, Packed | Padding)]
    return cuts, [part for part in mask.parts if part not in cuts]


def grid_of(mask: Mask | None) -> Window2d | None:
    """Return the 2-D window among the mask's parts; None without one."""
    parts = () if mask is None else mask.parts
    return next((part for part in parts if isinstance(part, Window2d)), None)


def query_blocks(mask: Mask, num_queries: int, num_keys: int, size: int) -> QueryBlocks:
    """Divide the queries into blocks of about `size`. Long packed sequences begin with a new block;
    short ones share blocks."""
    packed = next((part for part in mask.parts if isinstance(part, Packed)), None)
    if packed is None:
        return QueryBlocks.of_size(size, num_queries, num_keys)
    least = min(SMALL, size)
    starts, start = [0], 0
    for length in packed.known_lengths[0]:
        if length >= least or start - starts[-1] >= least:
            parts = max(1, round(length / size))
            starts += [start + length * part // parts for part in range(parts)]
        start += length
        if length >= least:
            starts.append(start)
    cuts = np.unique([cut for cut in starts if cut < num_queries])
    return QueryBlocks(cuts, np.append(cuts[1:], num_queries), num_queries, num_keys, num_keys)


class _Builder:
    """Makes the tasks of one batch item and head."""

    def __init__(
        self, mask: Mask, item: int, head: int, num_queries: int, num_keys: int, width: int
    ):
        self.mask, self.width = mask, width
        self.where = torch.tensor(item), torch.tensor(head)
        self.sizes = num_queries, num_keys
        self.is_relative = all(isinstance(part, Window | Causal) for part in mask.parts)

    def task(
        self, start: int, stop: int, coarse: list[Run], parts: list[tuple[int, list[Run]]]
    ) -> Task:
        """Return the cheapest steps of a block of queries; `parts` has the end and runs of each."""
        long = [run for run in coarse if run[2] == ALL and run[1] - run[0] >= LONG]
        found: list[list[Step]] = []
        for apart in ([], long) if long else ([],):
            before = [step for run in apart for step in self._steps(start, start, stop, [run])]
            rest = [run for run in coarse if run not in apart]
            found.append(before + self._steps(start, start, stop, rest))
            pieces, first = [*before], start
            for end, runs in parts:
                pieces += self._steps(start, first, end, _without(runs, apart))
                first = end
            found.append(pieces)
        steps = min(found, key=lambda some: sum(step.cost(self.width) for step in some))
        return Task.of(slice(start, stop), slice(0, self.sizes[1]), steps)

    def _steps(self, start: int, first: int, stop: int, runs: list[Run]) -> list[Step]:
        """Return the steps of the queries `first` … `stop` − 1 of a task that begins at `start`."""
        steps = []
        for some in _portions(runs):
            step = _step(first - start, stop - first, some)
            if self.is_relative:
                places = (number for run, size in step.runs for number in (run - first, size))
                step = replace(step, likeness=(step.size, *places))
            steps.append(step)
        return steps


def _without(runs: list[Run], others: list[Run]) -> list[Run]:
    """Return the runs without the keys of the other runs."""
    for first, last, _ in others:
        left = []
        for start, end, kind in runs:
            pieces = (start, min(end, first), kind), (max(start, last), end, kind)
            left += [piece for piece in pieces if piece[1] > piece[0]]
        runs = left
    return runs


def _portions(runs: list[Run]) -> Iterator[list[Run]]:
    """Yield the runs in portions of at most MOST_KEYS keys, in order."""
    some: list[Run] = []
    size = 0
    for start, end, kind in runs:
        while start < end:
            stop = min(end, start + MOST_KEYS - size)
            some.append((start, stop, kind))
            size += stop - start
            start = stop
            if size == MOST_KEYS:
                yield some
                some, size = [], 0
    if some:
        yield some


def _step(start: int, size: int, runs: Sequence[Run]) -> Step:
    """Return the step that reads these runs of keys; neighbouring runs are merged."""
    joined = [[*runs[0][:2]]]
    for first, end, _ in runs[1:]:
        if joined[-1][1] == first:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    keys = tuple((first, end - first) for first, end in joined)
    is_masked = any(kind == SOME for _, _, kind in runs)
    return Step(start, size, keys, sum(size for _, size in keys), is_masked)


def _strips(mask: Mask) -> Iterator[Task]:
    """Yield the tasks of a grid, divided into strips of columns. The tokens of a strip are a
    sequence, in which a block of queries is a tile and reaches neighbouring keys. The tokens before
    the grid are keys of each strip, and have a task of their own."""
    grid = grid_of(mask)
    assert grid is not None
    before, alone = grid.num_prefix_tokens, mask is grid
    tokens = torch.arange(grid.num_tokens)
    if before:
        runs = [(0, grid.num_tokens, ALL if alone else SOME)]
        steps = [_step(0, before, some) for some in _portions(runs)]
        yield Task.of(slice(0, before), slice(0, grid.num_tokens), steps)
    places = tokens[before:].view(grid.height, grid.width)
    for left in range(0, grid.width, TILE):
        right = min(grid.width, left + TILE)
        first, last = max(0, left - grid.radius_w), min(grid.width, right + grid.radius_w)
        columns = last - first
        steps = []
        for top in range(0, grid.height, TILE):
            bottom = min(grid.height, top + TILE)
            rows = max(0, top - grid.radius_h), min(grid.height, bottom + grid.radius_h)
            runs = [(0, before, ALL)] if before else []
            likeness = (
                left - first,
                columns,
                right - left,
                bottom - top,
                top - rows[0],
                rows[1] - rows[0],
            )
            runs.append((before + rows[0] * columns, before + rows[1] * columns, SOME))
            first_query, size = top * (right - left), (bottom - top) * (right - left)
            for number, some in enumerate(_portions(runs)):
                step = _step(first_query, size, some)
                like = (*likeness, number) if alone else None
                steps.append(replace(step, is_masked=True, likeness=like))
        keys = torch.cat([tokens[:before], places[:, first:last].flatten()])
        yield Task.of(places[:, left:right].flatten(), keys, steps)
