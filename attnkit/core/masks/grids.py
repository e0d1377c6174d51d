"""Masks over grids: 2-D windows, blocks of queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from attnkit.core.arguments import as_tensor, whole
from attnkit.core.masks.base import Mask, register
from attnkit.core.masks.plan import ALL, NONE, SOME, Plan, QueryBlocks

_MAX_PREFIX_TOKENS = 16  # more extra tokens are not taken for class and register tokens


@dataclass(frozen=True)
class Window2d(Mask):
    """A window on a grid of height × width tokens, stored row by row.

        (y, x) sees (y′, x′) where |y − y′| ≤ radius_h and |x − x′| ≤ radius_w

    The window is cut at the grid's edges: it does not wrap around, and it does not slide inward as
    that of NATTEN does (Hassani et al. 2023). The `num_prefix_tokens` tokens before the grid
    (class, registers) see all tokens and are seen by all.
    """

    height: int
    width: int
    radius_h: int
    radius_w: int
    num_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("height", 1),
            ("width", 1),
            ("radius_h", 0),
            ("radius_w", 0),
            ("num_prefix_tokens", 0),
        ):
            size = getattr(self, name)
            number = whole(size)
            if number is None or number < least:
                raise ValueError(f"{name}: expected an integer ≥ {least}, got {size!r} (Window2d)")
            object.__setattr__(self, name, number)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, prefix and grid together."""
        return self.num_prefix_tokens + self.height * self.width

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if not num_queries == num_keys == self.num_tokens:
            more = num_keys - self.height * self.width
            fits = num_queries == num_keys and 0 < more <= _MAX_PREFIX_TOKENS
            hint = f"; for a class token and registers: num_prefix_tokens={more}" if fits else ""
            raise ValueError(
                f"mask: Window2d is for {self.num_tokens} tokens ({self.num_prefix_tokens} and "
                f"{self.height} × {self.width}), got {num_queries} queries and {num_keys} keys"
                + hint
            )

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        query, key = query - self.num_prefix_tokens, key - self.num_prefix_tokens
        near_h = (query // self.width - key // self.width).abs() <= self.radius_h
        near_w = (query % self.width - key % self.width).abs() <= self.radius_w
        return (query < 0) | (key < 0) | near_h & near_w

    def plan(self, blocks: QueryBlocks) -> Plan:
        before, width = self.num_prefix_tokens, blocks.width
        first, last = (
            (blocks.start - before) // self.width,
            (blocks.stop - 1 - before) // self.width,
        )
        top, bottom = (
            before + self.width * np.clip(row, 0, self.height)
            for row in (first - self.radius_h, last + self.radius_h + 1)
        )
        sees_all = blocks.start < before
        top, bottom = np.where(sees_all, before, top), np.where(sees_all, width, bottom)
        ends = np.full_like(top, before), top, bottom, np.full_like(top, width)
        return Plan.of_rows(width, ends, [ALL, NONE, SOME, NONE])


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """Block-sparse attention: block a of queries sees block b of keys where grid[a, b] is True.

    block_size: tokens of a block, one number or (queries, keys); the last block may be smaller.
    """

    grid: Annotated[Tensor, "*heads query_blocks key_blocks", bool]
    block_size: int | tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", as_tensor("grid", self.grid))
        given: Any = self.block_size
        sizes = tuple(map(whole, given)) if isinstance(given, Sequence) else (whole(given),) * 2
        if len(sizes) != 2 or any(size is None or size < 1 for size in sizes):
            raise ValueError(
                f"block_size: expected at least 1, one integer or two, got {given!r} (Blocks)"
            )
        object.__setattr__(self, "block_size", sizes)
        if self.grid.dtype != torch.bool:
            raise TypeError(f"grid: expected booleans (True = may look), got {self.grid.dtype}")
        if self.grid.ndim not in (2, 3):
            raise ValueError(
                "grid: expected [query blocks, key blocks] or [heads, …], "
                f"got {list(self.grid.shape)}"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of tokens of a block of queries and of a block of keys."""
        size = self.block_size
        return (size, size) if isinstance(size, int) else size

    @property
    def leading(self) -> tuple[int, int]:
        return 1, self.grid.shape[0] if self.grid.ndim == 3 else 1

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        tokens = zip((num_queries, num_keys), self.sizes, strict=True)
        expected = [-(-total // size) for total, size in tokens]
        if list(self.grid.shape[-2:]) != expected or self.leading[1] not in (1, num_heads):
            raise ValueError(
                f"mask: Blocks has the grid {list(self.grid.shape)}, expected {expected} or "
                f"{[num_heads, *expected]} for {num_queries} queries and {num_keys} keys"
            )

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        rows, columns = self.sizes
        grid = self.grid.to(key.device)
        if self.leading[1] == 1:
            return grid.view(grid.shape[-2:])[query // rows, key // columns]
        return grid[head, query // rows, key // columns]

    def plan(self, blocks: QueryBlocks) -> Plan:
        rows, columns = self.sizes
        grid = self.grid.numpy(force=True)
        grid = grid.reshape(1, -1, *grid.shape[-2:])
        first, last = blocks.start // rows, (blocks.stop - 1) // rows
        seen_by_some = seen_by_all = grid[:, :, first]
        for step in range(1, int((last - first).max(initial=0)) + 1):
            row = grid[:, :, np.minimum(first + step, last)]
            seen_by_some, seen_by_all = seen_by_some | row, seen_by_all & row
        kinds = (seen_by_some.astype(np.int8) * SOME) + seen_by_all.astype(np.int8) * (ALL - SOME)
        ends = np.minimum(np.arange(1, grid.shape[3] + 1) * columns, blocks.width)
        return Plan.of_grid(ends, kinds)


register(Window2d, has_tensors=False)
register(Blocks)
