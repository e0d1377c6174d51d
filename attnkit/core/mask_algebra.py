"""What `&`, `|` and `~` of masks give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.masks import Mask

__all__ = ["And", "Not", "Or", "parts"]


@dataclass(frozen=True, eq=False)
class _Several(Mask):
    masks: tuple[Mask, ...]

    def fold(self, tensors: Iterable[Tensor]) -> Tensor:
        raise NotImplementedError

    @property
    def leading(self) -> tuple[int, int]:
        batches, heads = zip(*(mask.leading for mask in self.masks), strict=True)
        return max(batches), max(heads)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        for mask in self.masks:
            mask.check(batch, num_heads, num_queries, num_keys)

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        where = (batch, head, query, key, num_queries, num_keys)
        return self.fold(mask.allows(*where) for mask in self.masks)

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        return self.fold(mask.dense(num_queries, num_keys, device) for mask in self.masks)

    def select(self, rows: Tensor, heads: Tensor, num_queries: int, num_keys: int) -> Tensor:
        return self.fold(mask.select(rows, heads, num_queries, num_keys) for mask in self.masks)


@dataclass(frozen=True, eq=False)
class And(_Several):
    """Where all of the given masks allow to look; written `mask & mask`.

    Beside `Packed`, positions are counted within each sequence: `Packed(lengths) & Causal()` is
    causal in every sequence, aligned as asked.
    """

    def fold(self, tensors: Iterable[Tensor]) -> Tensor:
        return reduce(torch.Tensor.__and__, tensors)

    @property
    def packed(self) -> Any:
        """The part that says in which sequence, and where in it, a token is; None without one."""
        return next((mask for mask in self.masks if hasattr(mask, "within")), None)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        counted = [mask for mask in self.masks if mask.counts_positions]
        for mask in self.masks:
            if self.packed is None or mask not in counted:
                mask.check(batch, num_heads, num_queries, num_keys)
        if self.packed is not None:
            self.packed.check_inside(counted)

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        if self.packed is None:
            return super().allows(batch, head, query, key, num_queries, num_keys)
        across = (query, key, num_queries, num_keys)
        within = self.packed.within(query, key)
        return self.fold(
            mask.allows(batch, head, *(within if mask.counts_positions else across))
            for mask in self.masks
        )

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        combine = super().dense if self.packed is None else partial(Mask.dense, self)
        return combine(num_queries, num_keys, device)

    def select(self, rows: Tensor, heads: Tensor, num_queries: int, num_keys: int) -> Tensor:
        combine = super().select if self.packed is None else partial(Mask.select, self)
        return combine(rows, heads, num_queries, num_keys)

    def band(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        bands = [mask.band(num_queries, num_keys) for mask in self.masks]
        lower = [first for first, _ in bands if first is not None]
        upper = [last for _, last in bands if last is not None]
        return max(lower, default=None), min(upper, default=None)


@dataclass(frozen=True, eq=False)
class Or(_Several):
    """Where one of the given masks allows to look; written `mask | mask`."""

    def fold(self, tensors: Iterable[Tensor]) -> Tensor:
        return reduce(torch.Tensor.__or__, tensors)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Where the given mask does not allow to look; written `~mask`."""

    mask: Mask

    @property
    def leading(self) -> tuple[int, int]:
        return self.mask.leading

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        self.mask.check(batch, num_heads, num_queries, num_keys)

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        return ~self.mask.allows(batch, head, query, key, num_queries, num_keys)


def parts(mask: Mask | None) -> tuple[Mask, ...]:
    """The masks whose intersection the mask is."""
    if mask is None:
        return ()
    return mask.masks if isinstance(mask, And) else (mask,)


pytree.register_dataclass(And)
pytree.register_dataclass(Or)
pytree.register_dataclass(Not)
