"""attnkit as an attention of transformers: `attn_implementation="attnkit"`, in any of its models.

transformers asks two tables for what a model's configuration names: the function that computes
attention, and the function that makes the model's mask. The second is given a function of indices,
composed of a few known ones, which are read here as `Causal`, `Window`, `Packed` and `Padding`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnkit.core.attend import attend
from attnkit.core.contexts import Opened
from attnkit.core.kernels.record import record_backends
from attnkit.core.listeners import LISTENERS
from attnkit.core.masks.base import And, Dense, Mask, as_mask
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window
from attnkit.core.scores.kinds import ScaledDot
from attnkit.core.weights import attention_weights

_log = logging.getLogger(__name__)

NAME = "attnkit"


def register_transformers() -> None:
    """Make `attn_implementation="attnkit"` a choice of transformers' models.

        attnkit.interop.register_transformers()
        model = AutoModel.from_pretrained(name, attn_implementation="attnkit")
        model.set_attn_implementation("attnkit")  # or of a model that there is

    Every model that asks transformers' `AttentionInterface` then computes
    softmax(scale · q·k + position bias) v by `attend`, with its softcap, its dropout in training
    and grouped heads as they are. A causal mask, a sliding window, packed sequences (found by
    transformers from `position_ids`, or given as `cu_seq_lens_q`) and padding are `Causal`,
    `Window`, `Packed`, `Padding` and combinations by `&`, so that kernels leave out what they do
    not allow. Every other mask is evaluated to booleans, as transformers does for "sdpa"; so are
    the masks of one query and those of traced and compiled models.

    Unlike with "eager", a query that may look nowhere, such as left padding, gets exactly 0.

    `record_masks(model)` tells which mask and which kernel each layer ran with.

    Raises:
        ImportError: transformers is not installed.
        ValueError (of the model's forward): it has what `attend` does not compute: attention sinks
            (`s_aux`, `sinks`), or a choice of keys by `indices` or `block_indices`.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            "register_transformers() needs transformers: pip install transformers"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _MaskMaker(masking_utils))


class MaskTensor(Tensor):
    """A boolean mask [batch, 1, queries, keys] of transformers, True = may look, whose numbers are
    computed when something reads them.

    Models pass it on as any other tensor. `mask` says the same as a type. A model may write into
    the numbers or look at a part of them: once they are computed, they count, and `mask` is they.
    `Packed` of several items has the sequences of all items, as if these were one after the other.
    """

    @staticmethod
    def __new__(cls, source: "_Source", shape: Any, device: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(self, source: "_Source", shape: Any, device: Any) -> None:
        self._source = source

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
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
        """Whether the mask is of all items as one sequence."""
        return self.shape[0] > 1 and any(part.packs_sequences for part in self.mask.parts)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask}, shape={list(self.shape)})"


class _Source:
    """What the views of one mask share."""

    def __init__(self, typed: Mask, evaluate: Callable[[], Tensor]) -> None:
        self.mask, self._evaluate = typed, evaluate

    def numbers(self) -> Tensor:
        if not isinstance(self.mask, Dense):
            self.mask = Dense(self._evaluate())
        return self.mask.allowed


_AS_IT_IS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _is_whole(mask: Tensor, dim: int = 0, start: int | None = None, end=None, step=1) -> bool:
    """Whether a slice is all of the mask, as of models that cut it to the number of keys."""
    return not start and step == 1 and (end is None or end >= mask.shape[dim])


class _MaskMaker:
    """The function that `AttentionMaskInterface` has of us."""

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
        """Whether the mask is read as the type expected, with transformers' own numbers."""
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

        # the numbers of one query are as small as what they are made of
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
        """The mask as types; _Unknown where it is not made of what is known, or allows all."""
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
        """Add to what was found; _Unknown for a function that is not known."""
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
    """What a mask function is made of: bounds of the key's position − the query's, and the sequence
    [batch, tokens] and the position [batch, tokens] of each token."""

    def __init__(self) -> None:
        self.lower: list[int] = []
        self.upper: list[int] = []
        self.sequences: Tensor | None = None
        self.positions: list[Tensor] = []

    def check_positions(self) -> None:
        """_Unknown unless positions count up within each sequence, so that a distance of positions
        is one of tokens."""
        assert self.sequences is not None
        for positions in self.positions:
            if positions.shape != self.sequences.shape:
                raise _Unknown
            is_same = self.sequences.diff(dim=1) == 0
            if not (positions.diff(dim=1) == 1)[is_same].all():
                raise _Unknown


def _kinds(masking_utils: Any) -> dict[CodeType, str]:
    """The known mask functions by their code, which closures of one definition share."""
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
    """Masks that must be read: the name, the arguments, and the type that stands for it."""
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
    """At most one mask: key − query + offset within the bounds, where that hides anything."""
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
    """The lengths of the runs of equal numbers, which no two items share."""
    starts = nn.functional.pad(sequences.diff(dim=1) != 0, (1, 0), value=True)
    places = nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
    return Packed(places.diff())


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `AttentionInterface` has of us: the output [batch, queries, heads, value_dim], and the
    weights where they are asked for.

    Without a mask it is causal where "sdpa" is: where `is_causal`, or else the module's attribute,
    says so and there is more than one query. `sliding_window` is not read: the mask has it.
    """
    _check_options(module, s_aux, options)
    if len(query) != len(key):  # such as learned queries
        query = query.expand(len(key), -1, -1, -1)
    mask, bias = _mask_and_bias(module, query, key, attention_mask, is_causal, options)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    joins_items = False
    if isinstance(attention_mask, MaskTensor) and attention_mask.joins_items:
        joins_items = bias is None and not output_attentions and not LISTENERS.get()
        mask = mask if joins_items else as_mask(attention_mask.numbers())
    given = [query, key, value]
    if joins_items:
        given = [tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in given]
    score = ScaledDot(scale=scaling, softcap=softcap)
    with _recorded(module, mask, bias):
        output = attend(*given, score=score, mask=mask, bias=bias, dropout_p=dropout)
    if joins_items:
        output = output[0].unflatten(1, (len(query), -1)).transpose(0, 1)
    weights = None
    if output_attentions:
        weights = attention_weights(query, key, score=score, mask=mask, bias=bias)
    return output.transpose(1, 2).contiguous(), weights


def _check_options(module: nn.Module, s_aux: Tensor | None, options: dict[str, Any]) -> None:
    """ValueError for what would change the output and is not computed."""
    refused = {"s_aux": s_aux, **{name: options.get(name) for name in _REFUSED}}
    for name, given in refused.items():
        if given is not None:
            what = "attention sinks" if name in ("s_aux", "sinks") else "a choice of keys"
            raise ValueError(
                f"{name}: {type(module).__name__} has {what}, which attn_implementation="
                f'"{NAME}" does not compute; use model.set_attn_implementation("eager")'
            )


_REFUSED = ("sinks", "indices", "block_indices")


def _mask_and_bias(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> tuple[Mask | None, Tensor | None]:
    """Booleans are a mask; numbers are added to the scores."""
    ends, key_ends = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    packed = None
    if ends is not None:
        packed = Packed(ends.diff(), None if key_ends is None else key_ends.diff())
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = Causal() if is_causal and query.shape[2] > 1 else None
        return packed if causal is None else causal if packed is None else packed & causal, None
    if isinstance(attention_mask, MaskTensor):
        expected = [len(query), 1, query.shape[2], key.shape[2]]
        fits = [*attention_mask.shape] == expected
        mask = attention_mask.mask if fits else as_mask(attention_mask.numbers())
    elif attention_mask.is_floating_point():
        mask = None
    else:
        mask = as_mask(attention_mask)
    is_said = mask is not None and any(part.packs_sequences for part in mask.parts)
    if packed is not None and len(packed.lengths) > 1 and not is_said:
        raise ValueError(
            f"cu_seq_lens_q: {len(packed.lengths)} sequences, but the mask of "
            f"{type(module).__name__} does not separate them; give position_ids that begin anew "
            "with each sequence, and no attention_mask"
        )
    return mask, attention_mask if mask is None else None


class MaskCounts:
    """`counts[module][mask, kernel]`: how often each layer ran with which mask on which kernel.

    A mask is named by its types, "Causal & Padding"; "none", and "+ bias" where a bias was added.
    `str()` is a table.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[tuple[str, str]]] = {}

    def __str__(self) -> str:
        if not self.counts:
            return f'no attention ran by attn_implementation="{NAME}"'
        rows = [("module", "mask", "kernel")]
        for module, counter in self.counts.items():
            for (mask, kernel), times in counter.items():
                rows.append((module or "(itself)", mask, f"{kernel} ×{times}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


@contextmanager
def record_masks(model: nn.Module) -> Iterator[MaskCounts]:
    """Count the masks and kernels of each layer that runs by `attn_implementation="attnkit"`.

        with attnkit.interop.record_masks(model) as record:
            model(**batch)
        print(record)

    `attnkit.record_backends(model)` counts all attention of a model, without the masks.
    """
    record = MaskCounts()
    names = {id(module): name for name, module in model.named_modules()}
    with _RECORDS.opened((record, names)):
        yield record


_RECORDS: Opened[tuple[MaskCounts, dict[int, str]]] = Opened("records of masks")


@contextmanager
def _recorded(module: nn.Module, mask: Mask | None, bias: Tensor | None) -> Iterator[None]:
    """What the block runs goes into the open records."""
    records = () if torch.compiler.is_compiling() else _RECORDS.get()
    if not records:
        yield
        return
    with record_backends() as ran:
        yield
    name = "none" if mask is None else " & ".join(type(part).__name__ for part in mask.parts)
    for kernel, times in ran.total().items():
        for record, names in records:
            counter = record.counts.setdefault(names.get(id(module), ""), Counter())
            counter[name if bias is None else f"{name} + bias", kernel] += times
