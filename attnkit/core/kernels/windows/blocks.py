"""The geometry of windows: blocks of queries, the keys they reach, and what the mask says there.

Along a line, a block of queries reaches one run of keys, and the runs of the next blocks overlap
it: views of the same memory, never copied. On a grid, strips of columns are such lines, whose
blocks are tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.core.masks.base import Mask
from attnkit.core.masks.grids import Window2d
from attnkit.core.masks.sequences import Causal, Window
from attnkit.core.precision import cast_bias

TILE = 8  # rows and columns of a tile of queries
CHUNK_ELEMENTS = 2**20  # of keys, counted as often as they are read: what stays in the cache


@dataclass(frozen=True)
class Chunk:
    """Blocks of queries and, for each, the run of keys it reaches; one block a step further on."""

    count: int
    query_start: int
    query_size: int
    key_start: int
    key_step: int
    key_size: int

    @property
    def num_pairs(self) -> int:
        """How many scores it computes of each head."""
        return self.count * self.query_size * self.key_size

    @property
    def key_end(self) -> int:
        return self.key_start + (self.count - 1) * self.key_step + self.key_size

    def queries(self, tensor: Tensor) -> Tensor:
        """The blocks of [heads, tokens, …] as a view [count, heads, query_size, …]."""
        return _side_by_side(tensor, self.query_start, self.count, self.query_size)

    def keys(self, tensor: Tensor) -> Tensor:
        """The runs of [heads, tokens, dim] as a view [count, heads, key_size, dim]."""
        runs = tensor[:, self.key_start : self.key_end].unfold(1, self.key_size, self.key_step)
        return runs.movedim(1, 0).movedim(-1, 2)

    def add_keys(self, total: Tensor, gradient: Tensor, start_of_total: int) -> None:
        """Add gradients of the runs to those of the keys from `start_of_total` on.

        The runs overlap, their pieces of one step do not.
        """
        for start in range(0, self.key_size, self.key_step):
            size = min(self.key_step, self.key_size - start)
            whole = self.count if size == self.key_step else self.count - 1
            first = self.key_start - start_of_total + start
            piece = gradient[:, :, start : start + size]
            if whole:
                steps = _side_by_side(total, first, whole, self.key_step)
                steps[:, :, :size].add_(piece[:whole])
            if whole < self.count:
                last = first + whole * self.key_step
                total[:, last : last + size].add_(piece[whole])


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

    def lines(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Its queries, keys and values as lines [heads, tokens, dim]."""
        q, k, v = self.queries(query), self.keys(key), self.keys(value)
        heads, dim = query.shape[0], query.shape[-1]
        return q.reshape(heads, -1, dim), k.reshape(heads, -1, dim), v.reshape(heads, -1, dim)

    def tokens(
        self, num_queries: int, num_keys: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Which tokens the strip's queries and keys are."""
        rows, keys = (torch.arange(size, device=device)[None] for size in (num_queries, num_keys))
        return self.queries(rows).flatten(), self.keys(keys).flatten()

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
            yield Chunk(
                1, i * self.block, size, min(start, end), self.key_step, max(0, end - start)
            )


def block_size(reach: int) -> int:
    """Queries of a block: wide runs are shared by more of them."""
    return min(256, max(64, reach // 4 // 32 * 32))


def grid_of(mask: Mask | None) -> Window2d | None:
    """The 2-D window among the masks."""
    parts = () if mask is None else mask.parts
    return next((part for part in parts if isinstance(part, Window2d)), None)


def strips(mask: Mask, num_queries: int, num_keys: int) -> Iterator[Strip]:
    """The strips that hold all queries but those of prefix tokens."""
    grid = grid_of(mask)
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


@dataclass(frozen=True)
class Part:
    """Chunks of a strip that are computed one after the other, beside other parts."""

    strip: Strip
    chunks: tuple[Chunk, ...]
    tokens: tuple[Tensor, Tensor]

    @property
    def keys(self) -> slice:
        """The keys of the strip that they reach."""
        return slice(
            min(chunk.key_start for chunk in self.chunks),
            max(chunk.key_end for chunk in self.chunks),
        )


def parts(terms: "Terms", width: int) -> Iterator[Part]:
    """A chunk of a line each, or a strip of a grid, whose tokens are gathered once."""
    for strip in strips(terms.mask, *terms.sizes):
        tokens = strip.tokens(*terms.sizes, terms.device)
        chunks = tuple(strip.chunks(width))
        for some in [(chunk,) for chunk in chunks] if strip.grid is None else [chunks]:
            yield Part(strip, some, tokens)


class Terms:
    """What is added to the scores of a block: 0 or −inf where the mask says so, and the bias."""

    def __init__(self, mask: Mask, bias: Tensor | None, query: Tensor, key: Tensor) -> None:
        self.mask, self.bias = mask, bias
        self.sizes = query.shape[2], key.shape[2]
        self.dtype, self.device = query.dtype, query.device
        # where only distances count, all blocks of a chunk have the term of the first
        is_line = all(isinstance(part, Window | Causal) for part in mask.parts)
        self.is_shared = bias is None and (is_line or isinstance(mask, Window2d))

    def of(self, batch: int | Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """[count, 1 or heads, queries, keys] for token indices [count, queries], [count, keys]."""
        item = torch.as_tensor(batch, device=self.device)
        head = heads[:, None, None]
        query, key = rows[:, None, :, None], keys[:, None, None, :]
        allowed = self.mask.allows(item, head, query, key, *self.sizes)
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        if self.bias is None:
            return torch.where(allowed, zero, -torch.inf)
        indices = (item, head, query, key)
        sizes = self.bias.shape
        bias = self.bias[tuple(i if n > 1 else i * 0 for i, n in zip(indices, sizes, strict=True))]
        return torch.where(allowed, cast_bias(bias, self.dtype), -torch.inf)

    def of_chunk(
        self, chunk: Chunk, batch: int, heads: Tensor, query_tokens: Tensor, key_tokens: Tensor
    ) -> Tensor:
        """The term of a chunk of a strip whose tokens are given."""
        rows = query_tokens[chunk.query_start :].unfold(0, chunk.query_size, chunk.query_size)
        keys = key_tokens[chunk.key_start :].unfold(0, chunk.key_size, chunk.key_step)
        count = 1 if self.is_shared else chunk.count
        return self.of(batch, heads, rows[:count], keys[:count])


def _side_by_side(tensor: Tensor, start: int, count: int, size: int) -> Tensor:
    return tensor[:, start : start + count * size].unflatten(1, (count, size)).movedim(1, 0)
