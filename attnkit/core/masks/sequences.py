"""Masks along sequences: causal, padding, windows, packed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from attnkit.core.arguments import as_tensor, whole
from attnkit.core.masks.base import KEY_BLOCK, Dense, Mask, register
from attnkit.core.masks.kept import kept
from attnkit.core.masks.plan import ALL, NONE, SOME, Plan, QueryBlocks


class _Band(Mask):
    """Base class of masks that allow exactly a band of keys around each query's own position."""

    align: Literal["top_left", "bottom_right"] | None
    counts_positions = True

    def __post_init__(self) -> None:
        if self.align not in (None, "top_left", "bottom_right"):
            raise ValueError(
                f"align: expected 'top_left' or 'bottom_right', got {self.align!r} "
                f"({type(self).__name__} mask)"
            )

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if self.align is None and num_queries != num_keys:
            raise ValueError(
                f"mask: {type(self).__name__}() with {num_queries} queries and {num_keys} keys is "
                "ambiguous; give align='top_left' or align='bottom_right'"
            )

    def offset(self, num_queries: Any, num_keys: Any) -> Any:
        """Return how far the key at a query's own position lies behind the key of its number."""
        return num_keys - num_queries if self.align == "bottom_right" else 0

    def plan(self, blocks: QueryBlocks) -> Plan:
        return Plan.of_band(blocks, *self.band(blocks.num_queries, blocks.num_keys))


@dataclass(frozen=True)
class Causal(_Band):
    """A causal mask: query i sees the keys up to its own position.

    | align            | i sees j when              | meaning where queries ≠ keys               |
    |------------------|----------------------------|--------------------------------------------|
    | `"top_left"`     | j ≤ i                      | both sequences begin together              |
    | `"bottom_right"` | j ≤ i + (keys − queries)   | both end together, as in cached decoding   |

    Libraries assume different alignments, so you must give it where it matters: with `align=None`,
    unequal numbers of queries and keys raise ValueError.
    """

    align: Literal["top_left", "bottom_right"] | None = None

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        return key <= query + self.offset(num_queries, num_keys)

    def band(self, num_queries: Any, num_keys: Any) -> tuple[Any, Any]:
        return None, self.offset(num_queries, num_keys)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """A padding mask: every query of a batch item sees the keys of the item that are not padding.

    lengths: for each item the number of real keys, which come first, or booleans, True = real.
    """

    lengths: Annotated[Tensor, "batch", int] | Annotated[Tensor, "batch keys", bool]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _signed(as_tensor("lengths", self.lengths)))
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

    @property
    def leading(self) -> tuple[int, int]:
        return self.lengths.shape[0], 1

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        lengths = self.lengths.to(key.device)
        return lengths[batch, key] if lengths.dtype == torch.bool else key < lengths[batch]

    def plan(self, blocks: QueryBlocks) -> Plan:
        lengths, width = self.lengths.numpy(force=True)[:, None, None], blocks.width
        if self.lengths.dtype == torch.bool:
            changes = np.count_nonzero(lengths[..., 1:] != lengths[..., :-1], axis=-1)
            if changes.max(initial=0) > max(KEY_BLOCK, width // KEY_BLOCK):  # many short runs
                return Dense(self.lengths[:, None, None]).plan(blocks)
            kinds = np.where(lengths, ALL, NONE).astype(np.int8)
            plan = Plan.of_grid(np.arange(1, width + 1), kinds)
        else:
            ends = np.clip(lengths, 0, width), np.array(width)
            plan = Plan.of_rows(width, ends, [ALL, NONE])
        return plan.expanded(len(lengths), 1, len(blocks.start))


@dataclass(frozen=True)
class Window(_Band):
    """A sliding window: query i sees the keys i − left … i + right (Beltagy et al., Longformer,
    2020).

    `None` means no limit on that side. If the numbers of queries and keys differ, `align` gives the
    position of query i among the keys, as in `Causal`: key i ("top_left") or key i + keys − queries
    ("bottom_right"). `Window(left, right) & Causal()` is `Window(left, 0)`.
    """

    left: int | None
    right: int | None
    align: Literal["top_left", "bottom_right"] | None = None

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if size is None:
                continue
            number = whole(size)
            if number is None or number < 0:
                raise ValueError(f"{name}: expected an integer ≥ 0 or None, got {size!r} (Window)")
            object.__setattr__(self, name, number)
        super().__post_init__()

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        distance = key - query - self.offset(num_queries, num_keys)
        allowed = distance == distance if self.left is None else distance >= -self.left
        return allowed if self.right is None else allowed & (distance <= self.right)

    def band(self, num_queries: Any, num_keys: Any) -> tuple[Any, Any]:
        offset = self.offset(num_queries, num_keys)
        return (
            None if self.left is None else offset - self.left,
            None if self.right is None else offset + self.right,
        )


FEW = 1024  # lengths on a CPU: reading so few takes less time than comparing them with a copy


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """Several sequences, concatenated; the tokens of a sequence see only that sequence.

    lengths: the number of queries of each sequence; their sum is the number of queries.
    key_lengths: the number of keys of each sequence; None: `lengths`.

    `Causal` and `Window` that are combined with it by `&` count positions within each sequence.
    """

    lengths: Annotated[Tensor, "sequences", int]
    key_lengths: Annotated[Tensor, "sequences", int] | None = None
    packs_sequences = True

    def __post_init__(self) -> None:
        for name in ("lengths", "key_lengths"):
            given: Any = getattr(self, name)
            if given is None and name == "key_lengths":
                continue
            given = _signed(as_tensor(name, given))
            object.__setattr__(self, name, given)
            if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
                raise TypeError(f"{name}: expected integers [sequences], got {given.dtype}")
            if given.ndim != 1:
                raise ValueError(f"{name}: expected the shape [sequences], got {list(given.shape)}")
        queries, keys = map(len, self.both_lengths)
        if queries != keys:
            raise ValueError(f"key_lengths: {keys} sequences, but lengths has {queries}")

    @property
    def both_lengths(
        self,
    ) -> tuple[Annotated[Tensor, "sequences", int], Annotated[Tensor, "sequences", int]]:
        """The lengths of the sequences in queries and in keys."""
        return self.lengths, self.lengths if self.key_lengths is None else self.key_lengths

    @property
    def known_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`both_lengths` as Python numbers; read once, because reading waits for a GPU."""

        def read() -> tuple[tuple[int, ...], tuple[int, ...]]:
            queries = tuple(self.lengths.tolist())
            keys = self.key_lengths
            return queries, queries if keys is None else tuple(keys.tolist())

        if self.lengths.is_cpu and len(self.lengths) <= FEW:
            return read()
        return kept(self, "_lengths", (), self.lengths.device, read)

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        if torch.compiler.is_compiling():
            return  # the lengths have no values while torch.compile traces
        if any(map(torch._C._functorch.is_batchedtensor, self.both_lengths)):
            raise ValueError("mask: torch.vmap over the lengths of Packed is not supported; loop")
        tokens = ("queries", num_queries), ("keys", num_keys)
        for (name, total), lengths in zip(tokens, self.known_lengths, strict=True):
            if min(lengths, default=0) < 0:
                raise ValueError(f"mask: Packed has a negative length, {min(lengths)}")
            if sum(lengths) != total:
                raise ValueError(
                    f"mask: the lengths of Packed sum to {sum(lengths)}, "
                    f"but there are {total} {name}"
                )

    def check_inside(self, masks: Sequence[Mask]) -> None:
        """Raise ValueError if a mask has no `align` and a sequence has unequal numbers of queries
        and keys."""
        ambiguous = [mask for mask in masks if getattr(mask, "align", None) is None]
        if not ambiguous or self.key_lengths is None or torch.compiler.is_compiling():
            return
        for num_queries, num_keys in zip(*self.known_lengths, strict=True):
            for mask in ambiguous:
                mask.check(1, 1, num_queries, num_keys)

    def within(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the positions of query and key within the query's sequence, and the numbers of its
        queries and keys."""
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

    def plan(self, blocks: QueryBlocks) -> Plan:
        first, last, _, keys = self._sequences_of(blocks)
        start, stop = np.append(0, keys)[first], keys[last]
        inside = np.where(first == last, ALL, SOME)
        width = np.full_like(start, blocks.width)
        return Plan.of_rows(blocks.width, [start, stop, width], [NONE, inside, NONE])

    def blocks_within(self, blocks: QueryBlocks) -> tuple[QueryBlocks, np.ndarray]:
        """Return the blocks for masks that count within sequences, and which blocks lie within one
        sequence: queries are counted from where the keys of their sequence begin, and `num_queries`
        and `num_keys` are those of the sequence."""
        first, last, queries, keys = self._sequences_of(blocks)
        start, key_start = np.append(0, queries)[first], np.append(0, keys)[first]
        shift = key_start - start
        lengths = queries[first] - start, keys[first] - key_start
        inside = QueryBlocks(blocks.start + shift, blocks.stop + shift, *lengths, blocks.width)
        return inside, first == last

    def _sequences_of(self, blocks: QueryBlocks) -> tuple[np.ndarray, ...]:
        """Return the first and the last sequence of each block, and the end of each sequence in
        queries and in keys."""
        queries, keys = (np.cumsum(lengths, dtype=np.int64) for lengths in self.known_lengths)
        first = np.searchsorted(queries, blocks.start, side="right")
        last = np.searchsorted(queries, blocks.stop - 1, side="right")
        return first, last, queries, keys

    def tabulated(self, num_queries: int, num_keys: int) -> Mask:
        lengths, key_lengths = self.both_lengths
        ends, key_ends = lengths.cumsum(0), key_lengths.cumsum(0)
        sequence = _sequence_of(torch.arange(num_queries, device=lengths.device), ends)
        return _PackedTables(
            sequence,
            _sequence_of(torch.arange(num_keys, device=lengths.device), key_ends),
            (ends - lengths)[sequence],
            (key_ends - key_lengths)[sequence],
            lengths[sequence],
            key_lengths[sequence],
        )


@dataclass(frozen=True, eq=False)
class _PackedTables(Mask):
    """`Packed` as lookup tables: the sequence of each query [queries] and of each key [keys], and
    for each query where its sequence begins and how long it is, in queries and in keys."""

    sequence: Tensor
    key_sequence: Tensor
    start: Tensor
    key_start: Tensor
    length: Tensor
    key_length: Tensor
    packs_sequences = True

    def within(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            query - self.start[query],
            key - self.key_start[query],
            self.length[query],
            self.key_length[query],
        )

    def allows(self, batch, head, query, key, num_queries, num_keys) -> Tensor:
        return self.sequence[query] == self.key_sequence[key]


def _signed(lengths: Tensor) -> Tensor:
    """Return the lengths in a signed dtype; torch computes little with unsigned ones."""
    return lengths.long() if lengths.dtype in _UNSIGNED else lengths


_UNSIGNED = torch.uint16, torch.uint32, torch.uint64


def _sequence_of(tokens: Tensor, ends: Tensor) -> Tensor:
    if torch.compiler.is_exporting():  # ONNX has no searchsorted
        return (tokens[..., None] >= ends).sum(dim=-1).clamp(max=ends.shape[0] - 1)
    return torch.searchsorted(ends, tokens.contiguous(), right=True).clamp(max=ends.shape[0] - 1)


register(Causal, has_tensors=False)
register(Padding)
register(Window, has_tensors=False)
register(Packed)
register(_PackedTables)
