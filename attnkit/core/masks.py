"""Masks: where a query may look. **True = may look**, here and everywhere in attnkit.

A mask is a small object that says what it means; each kernel lowers it to what it can read (a
flag, a boolean tensor). `&` intersects. A row that may look nowhere gives an output of exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["And", "Causal", "Dense", "Mask", "Padding", "as_mask"]


class Mask:
    """Where a query may look.

    Subclasses define `dense`, the boolean matrix they stand for; `&` gives the intersection.
    """

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """The boolean tensor, broadcastable to [batch, heads, queries, keys], True = may look."""
        raise NotImplementedError(f"{type(self).__name__} defines no dense()")

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        """Raise ValueError where the mask does not fit the attention it is given to."""

    def select(self, rows: Tensor, heads: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """The dense mask of some query rows and some heads only."""
        dense = self.dense(num_queries, num_keys, rows.device)
        if dense.shape[2] != 1:
            dense = dense[:, :, rows]
        return dense if dense.shape[1] == 1 else dense[:, heads]

    def to(self, *args, **kwargs) -> Mask:
        """The same mask with its tensors moved as by `Tensor.to`."""
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(*args, **kwargs), self)

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And((*_parts(self), *_parts(as_mask(other))))

    def __rand__(self, other: Tensor) -> Mask:
        return as_mask(other) & self


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees the keys up to its own position.

    | align            | i sees j when              | meaning where queries ≠ keys               |
    |------------------|----------------------------|--------------------------------------------|
    | `"top_left"`     | j ≤ i                      | both sequences begin together              |
    | `"bottom_right"` | j ≤ i + (keys − queries)   | both end together, as in cached decoding   |

    Libraries differ in the alignment they assume, so it must be said where it matters: with
    `align=None` unequal numbers of queries and keys raise ValueError.
    """

    align: Literal["top_left", "bottom_right"] | None = None

    def __post_init__(self) -> None:
        if self.align not in (None, "top_left", "bottom_right"):
            raise ValueError(
                f"align: expected 'top_left' or 'bottom_right', got {self.align!r} (Causal mask)"
            )

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if self.align is None and num_queries != num_keys:
            raise ValueError(
                f"mask: Causal() with {num_queries} queries and {num_keys} keys is ambiguous; "
                "give align='top_left' or align='bottom_right'"
            )

    def offset(self, num_queries: int, num_keys: int) -> int:
        """Query i sees the keys j ≤ i + offset."""
        return num_keys - num_queries if self.align == "bottom_right" else 0

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        rows = torch.arange(num_queries, device=device)[:, None]
        columns = torch.arange(num_keys, device=device)
        return (columns <= rows + self.offset(num_queries, num_keys))[None, None]

    def select(self, rows: Tensor, heads: Tensor, num_queries: int, num_keys: int) -> Tensor:
        columns = torch.arange(num_keys, device=rows.device)
        return (columns <= rows[:, None] + self.offset(num_queries, num_keys))[None, None]


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Every query of item b sees the keys of item b that are no padding.

    `lengths`: how many keys are real, integers [batch]; or which are, booleans [batch, keys].
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        # pytree maps rebuild masks with leaves that are no tensors; only tensors can be checked
        if not isinstance(self.lengths, Tensor):
            return
        if self.lengths.dtype == torch.bool:
            if self.lengths.ndim != 2:
                raise ValueError(
                    "lengths: a boolean Padding is [batch, keys], "
                    f"got the shape {list(self.lengths.shape)}"
                )
        elif self.lengths.is_floating_point() or self.lengths.is_complex():
            raise TypeError(
                "lengths: expected integers [batch] or booleans [batch, keys], "
                f"got {self.lengths.dtype}"
            )
        elif self.lengths.ndim != 1:
            raise ValueError(f"lengths: expected the shape [batch], got {list(self.lengths.shape)}")

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        expected = [batch, num_keys] if self.lengths.dtype == torch.bool else [batch]
        if list(self.lengths.shape) != expected:
            raise ValueError(
                f"mask: Padding has the shape {list(self.lengths.shape)}, "
                f"expected {expected} for {batch} items of {num_keys} keys"
            )

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        lengths = self.lengths.to(device)
        if lengths.dtype != torch.bool:
            lengths = torch.arange(num_keys, device=device) < lengths[:, None]
        return lengths[:, None, None, :]


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Any boolean tensor broadcastable to [batch, heads, queries, keys], True = may look."""

    allowed: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.allowed, Tensor):
            _check_boolean(self.allowed)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        check_broadcastable("mask", self.allowed, (batch, num_heads, num_queries, num_keys))

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        return as_4d(self.allowed).to(device)


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Where all of the given masks allow to look; written `mask & mask`."""

    masks: tuple[Mask, ...]

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        for mask in self.masks:
            mask.check(batch, num_heads, num_queries, num_keys)

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        return _all([mask.dense(num_queries, num_keys, device) for mask in self.masks])

    def select(self, rows: Tensor, heads: Tensor, num_queries: int, num_keys: int) -> Tensor:
        return _all([mask.select(rows, heads, num_queries, num_keys) for mask in self.masks])


def as_mask(mask: Mask | Tensor) -> Mask:
    """A mask from what users pass: masks as they are, boolean tensors as `Dense`."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    raise TypeError(
        f"mask: expected an attnkit mask or a boolean tensor, got {type(mask).__name__}"
    )


def as_4d(tensor: Tensor) -> Tensor:
    """A tensor that broadcasts to [batch, heads, queries, keys], with those four dimensions."""
    return tensor[(None,) * (4 - tensor.ndim)]


def check_broadcastable(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless `tensor` broadcasts to [batch, heads, queries, keys] = `shape`."""
    sizes = tuple(tensor.shape)
    if len(sizes) > 4 or any(
        size not in (1, full) for size, full in zip(reversed(sizes), reversed(shape), strict=False)
    ):
        raise ValueError(
            f"{name}: the shape {list(sizes)} does not broadcast to "
            f"[batch, heads, queries, keys] = {list(shape)}"
        )


def _check_boolean(tensor: Tensor) -> None:
    if tensor.dtype == torch.bool:
        return
    hint = "additive terms go into bias=" if tensor.is_floating_point() else "convert with .bool()"
    raise TypeError(
        f"mask: expected a boolean tensor (True = may look), got {tensor.dtype}; {hint}"
    )


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)


def _all(tensors: list[Tensor]) -> Tensor:
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result & tensor
    return result


# As pytrees, masks pass through torch.export, torch.func and Lightning's transfer to a device.
pytree.register_constant(Causal)
pytree.register_dataclass(Padding)
pytree.register_dataclass(Dense)
pytree.register_dataclass(And)
