r"""The plan of a mask: which keys all, some or none of a block of queries may look at.

A mask answers for rectangles, each a block of queries × a run of keys. `&`, `|` and `~` combine the
answers by three-valued logic, so that no mask is evaluated at every query and key:

| answer | meaning                 | `a & b`       | `a \| b`      | `~a`     |
|--------|-------------------------|---------------|---------------|----------|
| `NONE` | no query sees any key   | the smaller   | the larger    | `ALL`    |
| `SOME` | nothing is promised     | of the two    | of the two    | `SOME`   |
| `ALL`  | each query sees each    |               |               | `NONE`   |

`Mask.plan` returns it. Kernels compute rectangles that are `ALL` without a mask, read the mask
where they are `SOME`, and skip the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

NONE, SOME, ALL = 0, 1, 2

Numbers = int | np.ndarray


class QueryBlocks(NamedTuple):
    """Blocks of neighbouring queries: each holds the queries `start` … `stop` − 1.

    `num_queries` and `num_keys` are the sizes that masks are given, one number or one for each
    block; `width` is the number of keys.
    """

    start: np.ndarray
    stop: np.ndarray
    num_queries: Numbers
    num_keys: Numbers
    width: int

    @classmethod
    def of_size(cls, size: int, num_queries: int, num_keys: int) -> QueryBlocks:
        """Divide all queries into blocks of this size; the last may be smaller."""
        start = np.arange(0, num_queries, size)
        stop = np.minimum(start + size, num_queries)
        return cls(start, stop, num_queries, num_keys, num_keys)


@dataclass(frozen=True)
class BlockCounts:
    """The numbers of blocks of queries × keys that a mask allows entirely, partly and not at
    all."""

    full: int
    partial: int
    skipped: int

    @property
    def share(self) -> float:
        """The share of the blocks that are computed."""
        total = self.full + self.partial + self.skipped
        return (self.full + self.partial) / total if total else 0.0

    def __str__(self) -> str:
        return (
            f"{self.full} full, {self.partial} partial, {self.skipped} skipped, "
            f"{self.share:.3f} of the dense cost"
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """The answers of a mask for blocks of queries, per batch item and head where these differ.

    The rows of keys, one for each of [items, heads, blocks], are concatenated to one line, which is
    divided into runs: run r ends before `ends[r]`, and its answer is `kinds[r]`. No run crosses the
    end of a row.
    """

    shape: tuple[int, int, int]
    width: int
    ends: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of_rows(cls, width: int, ends: Sequence[Numbers], kinds: Sequence[Numbers]) -> Plan:
        """Make a plan from the ends and the answers of run after run, each broadcastable to [items,
        heads, blocks]. Ends do not decrease, and the last is `width`."""
        bounds = np.stack(np.broadcast_arrays(*ends), axis=-1)
        bounds = bounds.reshape((1,) * (4 - bounds.ndim) + bounds.shape)
        answers = np.stack(np.broadcast_arrays(*kinds), axis=-1).astype(np.int8)
        answers = np.broadcast_to(answers, bounds.shape)
        rows = np.arange(bounds[..., 0].size).reshape(bounds.shape[:3])
        bounds = bounds + rows[..., None] * width
        return cls(bounds.shape[:3], width, bounds.reshape(-1), answers.reshape(-1))

    @classmethod
    def of_grid(cls, ends: np.ndarray, kinds: np.ndarray) -> Plan:
        """Make a plan of answers [items, heads, blocks, runs] whose runs end at the keys [runs]."""
        width, size = int(ends[-1]), len(ends)
        is_last = np.ones(kinds.shape, bool)
        is_last[..., :-1] = kinds[..., 1:] != kinds[..., :-1]
        row, run = np.divmod(np.flatnonzero(is_last), size)
        return cls(kinds.shape[:3], width, ends[run] + row * width, kinds[is_last])

    @classmethod
    def of_band(
        cls, blocks: QueryBlocks, lower: Numbers | None, upper: Numbers | None, inside: int = ALL
    ) -> Plan:
        """Make the plan of a band: query i sees the keys i + lower … i + upper, or only some of
        them if `inside` is `SOME`; None: no limit."""
        width = blocks.width

        def key(offset: Numbers) -> np.ndarray:
            return np.clip(offset, 0, width)

        first, last = 0 * blocks.start, 0 * blocks.start
        if lower is not None:
            first, last = key(blocks.start + lower), key(blocks.stop - 1 + lower)
        after_first = after_last = np.full_like(blocks.start, width)
        if upper is not None:
            after_first = key(blocks.start + upper + 1)
            after_last = np.maximum(key(blocks.stop + upper), first)
        last = np.where(after_first <= last, after_last, last)
        after_first = np.maximum(after_first, last)
        ends = [first, last, after_first, after_last, np.full_like(first, width)]
        return cls.of_rows(width, ends, [NONE, SOME, inside, SOME, NONE])

    @classmethod
    def whole(cls, kind: int, blocks: QueryBlocks) -> Plan:
        """Make a plan with one answer for all queries and keys."""
        return cls.of_rows(blocks.width, [np.full_like(blocks.start, blocks.width)], [kind])

    def __and__(self, other: Plan) -> Plan:
        return _combined(self, other, np.minimum)

    def __or__(self, other: Plan) -> Plan:
        return _combined(self, other, np.maximum)

    def __invert__(self) -> Plan:
        return replace(self, kinds=(ALL - self.kinds).astype(np.int8))

    def where(self, chosen: np.ndarray) -> Plan:
        """Return the plan with `SOME` everywhere in the blocks that are not chosen, [blocks]."""
        if chosen.all():
            return self
        is_known = np.tile(chosen, self.shape[0] * self.shape[1])[self._row_of_runs()]
        return replace(self, kinds=np.where(is_known, self.kinds, SOME).astype(np.int8))

    def expanded(self, items: int, heads: int, blocks: int) -> Plan:
        """Return the plan with its rows repeated to the shape [items, heads, blocks]."""
        shape = items, heads, blocks
        if self.shape == shape:
            return self
        first = np.searchsorted(self._row_of_runs(), np.arange(prod(self.shape) + 1))
        own = np.arange(prod(self.shape)).reshape(self.shape)
        rows = np.broadcast_to(own, shape).reshape(-1)
        counts = np.diff(first)[rows]
        starts = counts.cumsum() - counts
        run = np.arange(counts.sum()) + np.repeat(first[rows] - starts, counts)
        shift = np.repeat((np.arange(len(rows)) - rows) * self.width, counts)
        return Plan(shape, self.width, self.ends[run] + shift, self.kinds[run])

    def simplified(self) -> Plan:
        """Return the plan without empty runs, and with neighbouring runs of one answer merged."""
        kept = np.diff(self.ends, prepend=0) > 0
        ends, kinds = self.ends[kept], self.kinds[kept]
        is_last = ends % max(1, self.width) == 0
        is_last[:-1] |= kinds[1:] != kinds[:-1]
        return Plan(self.shape, self.width, ends[is_last], kinds[is_last])

    def rows(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield for each row the list of its runs (start, end, answer) that are not `NONE`; the
        plan must be simplified."""
        runs: list[tuple[int, int, int]] = []
        start = offset = 0
        for end, kind in zip(self.ends.tolist(), self.kinds.tolist(), strict=True):
            if kind != NONE:
                runs.append((start - offset, end - offset, kind))
            start = end
            if end == offset + self.width:
                yield runs
                runs, offset = [], end

    def blocks(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the blocks of `size` keys that are not `NONE`, row by row.

        The plan must be simplified. Each result is [number]: the row, counted over all items ×
        heads × blocks, the block's number in its row, and whether it is `ALL`.
        """
        (row, column), full = (_one_by_one(*runs(size)) for runs in (self._seen, self._full))
        columns = -(-self.width // size)
        is_full = np.zeros(len(row), bool)
        is_full[np.searchsorted(row * columns + column, full[0] * columns + full[1])] = True
        return row, column, is_full

    def count(self, size: int) -> BlockCounts:
        """Count the blocks of `size` keys by answer; the plan must be simplified."""
        full, seen = (
            int((after - first).sum()) for _, first, after in (self._full(size), self._seen(size))
        )
        return BlockCounts(full, seen - full, prod(self.shape) * -(-self.width // size) - seen)

    def _full(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the runs of key blocks that are `ALL`: row, first block, end (exclusive)."""
        row = self._row_of_runs()
        ends, starts = self.ends - row * self.width, np.append(0, self.ends[:-1]) - row * self.width
        first = -(-starts // size)
        after = np.where(ends == self.width, -(-ends // size), ends // size)  # the last may be cut
        chosen = (self.kinds == ALL) & (first < after)
        return row[chosen], first[chosen], after[chosen]

    def _seen(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the runs of key blocks that are not `NONE`: row, first block, end (exclusive)."""
        plan = replace(self, kinds=np.minimum(self.kinds, SOME)).simplified()
        row = plan._row_of_runs()
        ends, starts = plan.ends - row * plan.width, np.append(0, plan.ends[:-1]) - row * plan.width
        chosen = plan.kinds != NONE
        row, first, after = row[chosen], (starts // size)[chosen], -(-ends // size)[chosen]
        is_shared = (np.diff(row, prepend=-1) == 0) & (first < np.append(0, after[:-1]))
        return row, first + is_shared, after  # a block shared by two runs belongs to the first

    def _row_of_runs(self) -> np.ndarray:
        return np.maximum(self.ends - 1, 0) // max(1, self.width)


def _one_by_one(
    row: np.ndarray, first: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return all numbers of the runs `first` … `after` − 1, with the row of each."""
    counts = after - first
    shift = first - (counts.cumsum() - counts)
    return np.repeat(row, counts), np.arange(counts.sum()) + np.repeat(shift, counts)


def _combined(a: Plan, b: Plan, operation: Callable[..., np.ndarray]) -> Plan:
    items, heads, blocks = np.broadcast_shapes(a.shape, b.shape)
    a, b = a.expanded(items, heads, blocks), b.expanded(items, heads, blocks)
    ends = np.concatenate([a.ends, b.ends])
    order = np.argsort(ends, kind="stable")  # a merge, since both halves are sorted
    ends = ends[order]
    kept = np.flatnonzero(np.diff(ends, prepend=0))  # the first of equal ends
    is_of_a = order < len(a.ends)
    runs_of_a = (is_of_a.cumsum() - is_of_a)[kept]  # the number of runs of a that ended before
    kinds = operation(a.kinds[runs_of_a], b.kinds[kept - runs_of_a])
    return replace(a, ends=ends[kept], kinds=kinds)
