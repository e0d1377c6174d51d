"""Masks that leave most pairs out: windows, packed sequences, blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.masks import Mask, check_align, check_align_name

__all__ = ["Blocks", "Packed", "Window", "Window2d"]


@dataclass(frozen=True)
class Window(Mask):
    """Query i sees the keys i − left … i + right (Beltagy et al., Longformer, 2020).

    `None` is no limit on that side. For queries ≠ keys, `align` says where query i stands among
    the keys, as in `Causal`: at key i ("top_left") or at key i + keys − queries ("bottom_right").
    `Window(left, right) & Causal()` is `Window(left, 0)`.
    """

    left: int | None
    right: int | None
    align: Literal["top_left", "bottom_right"] | None = None
    counts_positions = True

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None and (not isinstance(size, int) or size < 0):
                raise ValueError(f"{name}: expected an integer ≥ 0 or None, got {size!r} (Window)")
        check_align_name(self.align, "Window")

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        check_align(self, num_queries, num_keys)

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        distance = key - query
        if self.align == "bottom_right":
            distance = distance - (num_keys - num_queries)
        allowed = distance == distance if self.left is None else distance >= -self.left
        return allowed if self.right is None else allowed & (distance <= self.right)

    def band(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        offset = num_keys - num_queries if self.align == "bottom_right" else 0
        return (
            None if self.left is None else offset - self.left,
            None if self.right is None else offset + self.right,
        )


@dataclass(frozen=True)
class Window2d(Mask):
    """On a grid of height × width tokens, row by row, each sees its neighbourhood.

        (y, x) sees (y′, x′) where |y − y′| ≤ radius_h and |x − x′| ≤ radius_w

    The neighbourhood is cut at the grid's edges: it does not wrap, and it does not slide inward as
    that of NATTEN (Hassani et al. 2023). The `num_prefix_tokens` tokens before the grid (class,
    registers) see all tokens and are seen by all.
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
            if not isinstance(size, int) or size < least:
                raise ValueError(f"{name}: expected an integer ≥ {least}, got {size!r} (Window2d)")

    @property
    def num_tokens(self) -> int:
        """Prefix and grid together."""
        return self.num_prefix_tokens + self.height * self.width

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if not num_queries == num_keys == self.num_tokens:
            raise ValueError(
                f"mask: Window2d is for {self.num_tokens} tokens ({self.num_prefix_tokens} and "
                f"{self.height} × {self.width}), got {num_queries} queries and {num_keys} keys"
            )

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        query, key = query - self.num_prefix_tokens, key - self.num_prefix_tokens
        near_h = (query // self.width - key // self.width).abs() <= self.radius_h
        near_w = (query % self.width - key % self.width).abs() <= self.radius_w
        return (query < 0) | (key < 0) | near_h & near_w


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """Many sequences one after the other in one row; none sees another.

    lengths: the queries of each sequence, integers [sequences]; their sum is the number of queries.
    key_lengths: the keys of each; None: as many as queries.

    Beside `&`, `Causal` and `Window` count within each sequence.
    """

    lengths: Tensor
    key_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "key_lengths"):
            given = getattr(self, name)
            if isinstance(given, Sequence):
                given = torch.tensor(given)
                object.__setattr__(self, name, given)
            # pytree maps rebuild masks with leaves that are no tensors
            if not isinstance(given, Tensor):
                continue
            if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
                raise TypeError(f"{name}: expected integers [sequences], got {given.dtype}")
            if given.ndim != 1:
                raise ValueError(f"{name}: expected the shape [sequences], got {list(given.shape)}")
        if all(isinstance(lengths, Tensor) for lengths in self.both_lengths):
            queries, keys = map(len, self.both_lengths)
            if queries != keys:
                raise ValueError(f"key_lengths: {keys} sequences, but lengths has {queries}")

    @property
    def both_lengths(self) -> tuple[Tensor, Tensor]:
        """The lengths in queries and in keys."""
        return self.lengths, self.lengths if self.key_lengths is None else self.key_lengths

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if torch.compiler.is_compiling():
            return  # lengths have no values yet
        tokens = ("queries", num_queries), ("keys", num_keys)
        for (name, total), lengths in zip(tokens, self.both_lengths, strict=True):
            if len(lengths) and int(lengths.min()) < 0:
                raise ValueError(f"mask: Packed has a negative length, {int(lengths.min())}")
            if int(lengths.sum()) != total:
                raise ValueError(
                    f"mask: the lengths of Packed sum to {int(lengths.sum())}, "
                    f"but there are {total} {name}"
                )

    def check_inside(self, masks: Sequence[Mask]) -> None:
        """Raise ValueError where a mask does not say how it is aligned within the sequences."""
        ambiguous = [mask for mask in masks if getattr(mask, "align", None) is None]
        if not ambiguous or self.key_lengths is None or torch.compiler.is_compiling():
            return
        for num_queries, num_keys in zip(
            self.lengths.tolist(), self.key_lengths.tolist(), strict=True
        ):
            for mask in ambiguous:
                mask.check(1, 1, num_queries, num_keys)

    def within(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query and key counted within their sequences, and the lengths of the query's."""
        lengths, key_lengths = (lengths.to(query.device) for lengths in self.both_lengths)
        ends, key_ends = lengths.cumsum(0), key_lengths.cumsum(0)
        sequence = _sequence_of(query, ends)
        return (
            query - (ends - lengths)[sequence],
            key - (key_ends - key_lengths)[sequence],
            lengths[sequence],
            key_lengths[sequence],
        )

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        ends, key_ends = (lengths.to(query.device).cumsum(0) for lengths in self.both_lengths)
        return _sequence_of(query, ends) == _sequence_of(key, key_ends)


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """Block-sparse attention: block a of queries sees block b of keys where grid[a, b] is True.

    grid: booleans [query blocks, key blocks] or [heads, query blocks, key blocks].
    block_size: tokens of a block, for queries and keys or (queries, keys); the last may be cut.
    """

    grid: Tensor
    block_size: int | tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Tensor):
            return
        if min(self.sizes) < 1:
            raise ValueError(f"block_size: expected at least 1, got {self.block_size} (Blocks)")
        if self.grid.dtype != torch.bool:
            raise TypeError(f"grid: expected booleans (True = may look), got {self.grid.dtype}")
        if self.grid.ndim not in (2, 3):
            raise ValueError(
                "grid: expected [query blocks, key blocks] or [heads, …], "
                f"got {list(self.grid.shape)}"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a block of queries and of a block of keys."""
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


def _sequence_of(tokens: Tensor, ends: Tensor) -> Tensor:
    return torch.searchsorted(ends, tokens.contiguous(), right=True).clamp(max=len(ends) - 1)


pytree.register_constant(Window)
pytree.register_constant(Window2d)
pytree.register_dataclass(Packed)
pytree.register_dataclass(Blocks)
