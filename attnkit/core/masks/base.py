"""Masks: where a query may look. **True = may look**, here and everywhere in attnkit.

A mask is one function of indices, `allows(batch, head, query, key)`. Everything that kernels read
(flags, boolean tensors, blocks of them, FlexAttention's block masks) is derived from it. `&`, `|`
and `~` combine masks. A row that may look nowhere gives an output of exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial, reduce
from operator import and_, or_
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.arguments import as_tensor
from attnkit.core.masks.plan import ALL, NONE, SOME, Plan, QueryBlocks

Index = int | Tensor

KEY_BLOCK = 64  # keys of a boolean tensor that get one common answer in its plan


class Mask:
    """Base class of masks: a mask says at which keys a query may look.

    Subclasses define `allows`. `a & b` allows what both masks allow, `a | b` what at least one
    allows, `~a` what `a` does not allow.
    """

    counts_positions = False
    """Whether the mask compares positions of queries and keys. Beside `Packed`, such a mask is
    given the positions within the sequences."""
    packs_sequences = False
    """Whether the mask divides the tokens into sequences, as `Packed` does."""

    def allows(
        self,
        batch: Tensor,
        head: Tensor,
        query: Tensor,
        key: Tensor,
        num_queries: Index,
        num_keys: Index,
    ) -> Tensor:
        """Return whether the query may look at the key, as a boolean tensor. The first four
        arguments are integer tensors that broadcast; the result broadcasts to their shape."""
        raise NotImplementedError(f"{type(self).__name__} defines no allows()")

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        """Raise ValueError if the mask does not fit an attention of these sizes."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks whose intersection this is."""
        return (self,)

    @property
    def leading(self) -> tuple[int, int]:
        """Return the batch size and number of heads, each 1 if the mask is the same for all."""
        return 1, 1

    def band(self, num_queries: Any, num_keys: Any) -> tuple[Any, Any]:
        """Return (lower, upper): query i sees at most the keys i + lower … i + upper; None: no
        limit."""
        return None, None

    def plan(self, blocks: QueryBlocks) -> Plan:
        """Return which runs of keys all, some or none of each block of queries sees, without
        evaluating the mask at every query and key."""
        lower, upper = self.band(blocks.num_queries, blocks.num_keys)
        return Plan.of_band(blocks, lower, upper, SOME)

    def dense(
        self, num_queries: int, num_keys: int, device: torch.device
    ) -> Annotated[Tensor, "#batch #heads #queries #keys", bool]:
        """Return the mask as booleans, True = may look."""
        items, heads, rows = (
            torch.arange(size, device=device) for size in (*self.leading, num_queries)
        )
        return self.select(items, heads, rows, num_queries, num_keys)

    def select(
        self,
        items: Annotated[Tensor, "items", int],
        heads: Annotated[Tensor, "chosen_heads", int],
        rows: Annotated[Tensor, "rows", int],
        num_queries: int,
        num_keys: int,
    ) -> Annotated[Tensor, "#items #chosen_heads #rows #keys", bool]:
        """Return the dense mask of the given batch items, heads and query rows only."""
        keys = torch.arange(num_keys, device=rows.device)
        if self.leading[0] == 1:
            items = items[:1]
        allowed = self.allows(
            items[:, None, None, None],
            heads[:, None, None],
            rows[:, None],
            keys,
            num_queries,
            num_keys,
        )
        return as_4d(allowed)

    def tabulated(self, num_queries: int, num_keys: int) -> Mask:
        """Return an equal mask whose `allows` looks up tables that are computed once; for kernels
        that compile `allows`."""
        return self

    def to(self, *args, **kwargs) -> Mask:
        """Return the same mask with its tensors moved as by `Tensor.to`."""
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(*args, **kwargs), self)

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And((*self.parts, *as_mask(other).parts))

    def __rand__(self, other: Tensor) -> Mask:
        return as_mask(other) & self

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or((self, as_mask(other)))

    def __ror__(self, other: Tensor) -> Mask:
        return as_mask(other) | self

    def __invert__(self) -> Mask:
        return Not(self)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A mask given as a boolean tensor, True = may look."""

    allowed: Annotated[Tensor, "#batch #heads #queries #keys", bool]

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", as_tensor("mask", self.allowed))
        _check_boolean(self.allowed)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        check_broadcastable("mask", self.allowed, (batch, num_heads, num_queries, num_keys))

    @property
    def leading(self) -> tuple[int, int]:
        allowed = as_4d(self.allowed)
        return allowed.shape[0], allowed.shape[1]

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        allowed = as_4d(self.allowed).to(key.device)
        indices = (batch, head, query, key)
        sizes = allowed.shape
        return allowed[tuple(i if n > 1 else i * 0 for i, n in zip(indices, sizes, strict=True))]

    def plan(self, blocks: QueryBlocks) -> Plan:
        allowed = as_4d(self.allowed).numpy(force=True)
        bits = np.packbits(allowed, axis=3)  # eight keys each, 0 after the last key
        seen_by_some = seen_by_all = bits
        if allowed.shape[2] > 1:
            seen_by_some, seen_by_all = (
                fold.reduceat(bits, blocks.start, axis=2)
                for fold in (np.bitwise_or, np.bitwise_and)
            )
        num_keys = allowed.shape[3]
        bounds = np.arange(0, bits.shape[3], KEY_BLOCK // 8)
        is_full = seen_by_all == np.packbits(np.ones(num_keys, bool))
        some = np.logical_or.reduceat(seen_by_some > 0, bounds, axis=3)
        every = np.logical_and.reduceat(is_full, bounds, axis=3)
        kinds = np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)
        width = blocks.width
        ends = np.append(bounds[1:] * 8, num_keys) if num_keys > 1 else np.array([width])
        items, heads = kinds.shape[:2]
        return Plan.of_grid(ends, kinds).expanded(items, heads, len(blocks.start))

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        return as_4d(self.allowed).to(device)

    def select(
        self, items: Tensor, heads: Tensor, rows: Tensor, num_queries: int, num_keys: int
    ) -> Tensor:
        allowed = as_4d(self.allowed).to(rows.device)
        for dim, chosen in enumerate((items, heads, rows)):
            if allowed.shape[dim] > 1:
                allowed = allowed.index_select(dim, chosen)
        return allowed


class _Folded(Mask):
    """Base class of masks that combine other masks; `fold` works on tensors and on plans."""

    masks: tuple[Mask, ...]

    def fold(self, answers: Iterable[Any]) -> Any:
        raise NotImplementedError

    @property
    def leading(self) -> tuple[int, int]:
        batches, heads = zip(*(mask.leading for mask in self.masks), strict=True)
        return max(batches), max(heads)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        for mask in self.masks:
            mask.check(batch, num_heads, num_queries, num_keys)

    def plan(self, blocks: QueryBlocks) -> Plan:
        return self.fold(mask.plan(blocks) for mask in self.masks)

    def tabulated(self, num_queries: int, num_keys: int) -> Mask:
        return self.fold(mask.tabulated(num_queries, num_keys) for mask in self.masks)

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        where = (batch, head, query, key, num_queries, num_keys)
        return self.fold(mask.allows(*where) for mask in self.masks)

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        return self.fold(mask.dense(num_queries, num_keys, device) for mask in self.masks)

    def select(
        self, items: Tensor, heads: Tensor, rows: Tensor, num_queries: int, num_keys: int
    ) -> Tensor:
        where = (items, heads, rows, num_queries, num_keys)
        return self.fold(mask.select(*where) for mask in self.masks)


@dataclass(frozen=True)
class And(_Folded):
    """The intersection of masks, written `mask & mask`: it allows what all of them allow.

    Beside `Packed`, positions are counted within each sequence: `Packed(lengths) & Causal()` is
    causal in every sequence, with the alignment given to `Causal`.
    """

    masks: tuple[Mask, ...]

    def fold(self, answers: Iterable[Any]) -> Any:
        return reduce(and_, answers)

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def packed(self) -> Any:
        """The part that divides the tokens into sequences, such as `Packed`; None without one."""
        return next((mask for mask in self.masks if mask.packs_sequences), None)

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

    def select(
        self, items: Tensor, heads: Tensor, rows: Tensor, num_queries: int, num_keys: int
    ) -> Tensor:
        combine = super().select if self.packed is None else partial(Mask.select, self)
        return combine(items, heads, rows, num_queries, num_keys)

    def plan(self, blocks: QueryBlocks) -> Plan:
        if self.packed is None:
            return super().plan(blocks)
        inside, is_inside = self.packed.blocks_within(blocks)
        return self.fold(
            mask.plan(inside).where(is_inside) if mask.counts_positions else mask.plan(blocks)
            for mask in self.masks
        )

    def band(self, num_queries: Any, num_keys: Any) -> tuple[Any, Any]:
        bands = [mask.band(num_queries, num_keys) for mask in self.masks]
        lower = [first for first, _ in bands if first is not None]
        upper = [last for _, last in bands if last is not None]
        # torch 2.11 cannot compile max(…, default=None)
        return max(lower) if lower else None, min(upper) if upper else None


@dataclass(frozen=True)
class Or(_Folded):
    """The union of masks, written `mask | mask`: it allows what at least one of them allows."""

    masks: tuple[Mask, ...]

    def fold(self, answers: Iterable[Any]) -> Any:
        return reduce(or_, answers)


@dataclass(frozen=True)
class Not(_Folded):
    """The complement of a mask, written `~mask`: it allows what the mask does not allow."""

    mask: Mask

    @property
    def masks(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return (self.mask,)

    def fold(self, answers: Iterable[Any]) -> Any:
        (answer,) = answers
        return ~answer


def as_mask(mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool]) -> Mask:
    """Return a mask as it is, and a boolean tensor as `Dense`; raise TypeError for others."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    raise TypeError(
        f"mask: expected an attnkit mask or a boolean tensor, got {type(mask).__name__}"
    )


def as_4d(tensor: Tensor) -> Tensor:
    """Return the tensor with leading dimensions of size 1 added, up to four dimensions."""
    return tensor.view((1,) * (4 - tensor.ndim) + tensor.shape)


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
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"mask: expected a dense boolean tensor, got the layout {tensor.layout}; "
            "attnkit.Edges takes a sparse matrix"
        )
    if tensor.dtype == torch.bool:
        return
    hint = "additive terms go into bias=" if tensor.is_floating_point() else "convert with .bool()"
    raise TypeError(
        f"mask: expected a boolean tensor (True = may look), got {tensor.dtype}; {hint}"
    )


def register(kind: type, *, has_tensors: bool = True) -> None:
    """Register a dataclass of masks as a pytree, for torch.export, torch.func and Lightning's
    transfer to a device.

    This is what torch's `register_dataclass` does, without its checks of the fields: torch.export
    wraps numbers, and `tree_map` may put any object in the place of a tensor.

    Args:
        has_tensors: whether the fields are leaves; otherwise they are part of the structure.
    """
    names = [own.name for own in fields(kind)]

    def flatten(mask: Any) -> tuple[list[Any], Any]:
        if not has_tensors:
            return [], [getattr(mask, name) for name in names]
        given = [name for name in names if getattr(mask, name) is not None]
        return [getattr(mask, name) for name in given], given

    def flatten_with_keys(mask: Any) -> tuple[list[Any], Any]:
        leaves, given = flatten(mask)
        keys = map(pytree.GetAttrKey, given if has_tensors else ())
        return list(zip(keys, leaves, strict=True)), given

    def unflatten(leaves: Iterable[Any], given: Sequence[Any]) -> Any:
        pairs = zip(given, leaves, strict=True) if has_tensors else zip(names, given, strict=True)
        mask: Any = object.__new__(kind)
        for name, value in (dict.fromkeys(names) | dict(pairs)).items():
            object.__setattr__(mask, name, value)
        return mask

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"attnkit.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


for _kind in (Dense, And, Or, Not):
    register(_kind)
