"""transformers' masks as types of attnkit.

transformers composes a mask of functions of indices. Its functions for causal masks, windows,
packed sequences and padding are recognized by their code, and are read as `Causal`, `Window`,
`Packed` and `Padding`; any other is evaluated to booleans. Examples verify first that they are read
rightly.
"""

import logging
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnkit.core.masks.base import And, Dense, Mask
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window

_log = logging.getLogger(__name__)


class MaskTensor(Tensor):
    """A boolean mask [batch, 1, queries, keys] of transformers, True = may look, whose numbers are
    computed when something reads them.

    Models pass it on like any other tensor. `mask` is the same mask as a type. A model may write
    into the numbers or read a part of them: once they are computed, they count, and `mask` is made
    of them. `Packed` of several items has the sequences of all items, one item after the other.
    """

    @staticmethod
    def __new__(cls, source: "_Source", shape: Any, device: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(self, source: "_Source", shape: Any, device: Any) -> None:
        self._source = source

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func in _AS_IT_IS or (func is torch.ops.aten.slice.Tensor and _is_whole(*args)):
            return cls(args[0]._source, args[0].shape, args[0].device)
        args, kwargs = pytree.tree_map_only(cls, cls.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)

    def numbers(self) -> Tensor:
        """The booleans, as transformers evaluates them."""
        return self._source.numbers()

    @property
    def mask(self) -> Mask:
        """The mask as a type; `Dense` once its numbers were computed."""
        return self._source.mask

    @property
    def joins_items(self) -> bool:
        """Whether the mask is that of all items as one sequence."""
        return self.shape[0] > 1 and any(part.packs_sequences for part in self.mask.parts)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask}, shape={list(self.shape)})"


class _Source:
    """The state that the views of one mask share."""

    def __init__(self, typed: Mask, evaluate: Callable[[], Tensor]) -> None:
        self.mask, self._evaluate = typed, evaluate

    def numbers(self) -> Tensor:
        if not isinstance(self.mask, Dense):
            self.mask = Dense(self._evaluate())
        return self.mask.allowed


_AS_IT_IS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _is_whole(mask: Tensor, dim: int = 0, start: int | None = None, end=None, step=1) -> bool:
    """Whether a slice is all of the mask; some models cut it to the number of keys."""
    return not start and step == 1 and (end is None or end >= mask.shape[dim])


class MaskMaker:
    """The function that is registered in `AttentionMaskInterface`."""

    def __init__(self, masking_utils: Any) -> None:
        self._evaluate = masking_utils.sdpa_mask
        self._kinds = _kinds(masking_utils)
        wrong = [
            name for name, sizes, kind in _examples(masking_utils) if not self._reads(sizes, kind)
        ]
        if wrong:
            _log.warning(
                "this version of transformers makes the masks %s in a way that is not known here: "
                "all masks are evaluated to booleans", ", ".join(wrong),
            )  # fmt: skip
            self._kinds = {}

    def _reads(self, sizes: dict[str, Any], expected: type[Mask]) -> bool:
        """Whether the mask is read as the expected type, with transformers' own numbers."""
        try:
            mask = self._typed(**sizes)
        except _Unknown:
            return False
        shape = sizes["q_length"], sizes["kv_length"]
        parts = {type(part) for part in mask.parts}
        numbers = self._evaluate(**sizes, allow_is_causal_skip=False)
        return expected in parts and bool((mask.dense(*shape, numbers.device) == numbers).all())

    def __call__(self, **given: Any) -> Tensor | None:
        from transformers.utils.import_utils import is_tracing

        # the mask of one query is as small as its parts
        if given["q_length"] == 1 or is_tracing(given.get("attention_mask")):
            return self._evaluate(**given)
        try:
            mask = self._typed(**given)
        except _Unknown:
            return self._evaluate(**given)
        shape = given["batch_size"], 1, given["q_length"], given["kv_length"]
        given["allow_is_causal_skip"] = given["allow_is_bidirectional_skip"] = False
        source = _Source(mask, lambda: self._evaluate(**given))
        return MaskTensor(source, shape, given.get("device", "cpu"))

    def _typed(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Mask:
        """Return the mask as types; raise _Unknown if it has unknown parts, or allows all."""
        found = _Found()
        self._read(mask_function, found)
        offset = int(q_offset) - kv_offset
        parts: list[Mask] = []
        if found.sequences is not None:
            found.check_positions()
            is_whole = [*found.sequences.shape] == [batch_size, q_length]
            if offset or not is_whole or attention_mask is not None:
                raise _Unknown
            parts.append(_packed(found.sequences))
        elif found.positions:
            raise _Unknown
        parts += _bands(found, offset, q_length, kv_length)
        if attention_mask is not None:
            first = int(kv_offset)
            real = attention_mask[:, first : first + kv_length].bool()
            real = nn.functional.pad(real, (0, kv_length - real.shape[1]))
            if len(real) != batch_size:
                raise _Unknown
            if not real.all():
                parts.append(Padding(real))
        if not parts:
            raise _Unknown
        return And(tuple(parts)) if len(parts) > 1 else parts[0]

    def _read(self, function: Any, found: "_Found") -> None:
        """Add a function's meaning to `found`; raise _Unknown for an unknown function."""
        code: Any = getattr(function, "__code__", None)
        kind = self._kinds.get(code)
        if kind is None:
            raise _Unknown
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        if kind == "and":
            for part in cells[0]:
                self._read(part, found)
        elif kind == "remap":
            inner = dict(zip(code.co_freevars, cells, strict=True))
            found.positions.append(inner["position_ids"])
            self._read(inner["mask_function"], found)
        elif kind == "packed":
            if found.sequences is not None:
                raise _Unknown
            found.sequences = cells[0]
        elif kind == "causal":
            found.upper.append(0)
        elif kind == "sliding":
            found.lower.append(1 - cells[0])
        elif kind == "both ways":
            found.lower.append(-cells[0])
            found.upper.append(cells[0])


class _Unknown(Exception):
    """A mask that is not made of the functions known here."""


class _Found:
    """The parts of a mask function: bounds of the key's position − the query's, and the sequence
    [batch, tokens] and the position [batch, tokens] of each token."""

    def __init__(self) -> None:
        self.lower: list[int] = []
        self.upper: list[int] = []
        self.sequences: Tensor | None = None
        self.positions: list[Tensor] = []

    def check_positions(self) -> None:
        """Raise _Unknown unless positions count up within each sequence, so that a distance of
        positions is one of tokens."""
        assert self.sequences is not None
        for positions in self.positions:
            if positions.shape != self.sequences.shape:
                raise _Unknown
            is_same = self.sequences.diff(dim=1) == 0
            if not (positions.diff(dim=1) == 1)[is_same].all():
                raise _Unknown


def _kinds(masking_utils: Any) -> dict[CodeType, str]:
    """Return the known mask functions by their code, which closures of one definition share."""
    tensor = torch.zeros(1, 1, dtype=torch.long)
    causal = masking_utils.causal_mask_function
    return {
        function.__code__: kind
        for kind, function in (
            ("causal", causal),
            ("everything", masking_utils.bidirectional_mask_function),
            ("and", masking_utils.and_masks(causal)),
            ("sliding", masking_utils.sliding_window_overlay(1)),
            ("both ways", masking_utils.sliding_window_bidirectional_overlay(1)),
            ("packed", masking_utils.packed_sequence_mask_function(tensor)),
            ("remap", masking_utils.remap_positions_for_packed_sequence(causal, tensor)),
        )
    }


def _examples(masking_utils: Any) -> Iterator[tuple[str, dict[str, Any], type[Mask]]]:
    """Yield masks that must be recognized: the name, the arguments, and the type of each."""
    sizes = {"batch_size": 1, "q_length": 7, "kv_length": 7}
    causal = masking_utils.causal_mask_function
    sliding = masking_utils.sliding_window_causal_mask_function(3)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    sequences = torch.tensor([[0, 0, 0, 0, 0, 1, 1]])
    packed = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(sliding, positions),
        masking_utils.packed_sequence_mask_function(sequences),
    )
    both_ways = masking_utils.sliding_window_bidirectional_mask_function(2)
    yield "causal", {**sizes, "kv_length": 11, "q_offset": 4, "mask_function": causal}, Causal
    yield "sliding", {**sizes, "mask_function": sliding}, Window
    yield "bidirectional sliding", {**sizes, "mask_function": both_ways}, Window
    yield "packed", {**sizes, "mask_function": packed}, Packed


def _bands(found: _Found, offset: int, num_queries: int, num_keys: int) -> list[Mask]:
    """Return at most one mask: key − query + offset within the bounds, if that hides anything."""
    lower = max(found.lower, default=None)
    upper = min(found.upper, default=None)
    lower = None if lower is None or lower + offset <= 1 - num_queries else lower + offset
    upper = None if upper is None or upper + offset >= num_keys - 1 else upper + offset
    if lower is None and upper is None:
        return []
    ends = num_keys - num_queries
    align, start = ("bottom_right", ends) if offset == ends else ("top_left", 0)
    left = None if lower is None else start - lower
    right = None if upper is None else upper - start
    if min(left or 0, right or 0) < 0:
        raise _Unknown
    is_causal = (left, right) == (None, 0)
    return [Causal(align) if is_causal else Window(left, right, align)]  # type: ignore[arg-type]


def _packed(sequences: Tensor) -> Packed:
    """Return the lengths of the runs of equal numbers; no run is in two items."""
    starts = nn.functional.pad(sequences.diff(dim=1) != 0, (1, 0), value=True)
    places = nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
    return Packed(places.diff())
