"""attnkit as an attention of transformers: `attn_implementation="attnkit"`, in any of its models.

transformers looks up what a model's configuration names in two tables: the function that computes
attention, here, and the function that makes the model's mask, in `transformers_masks`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.attend import attend
from attnkit.core.contexts import Opened, uncompiled
from attnkit.core.kernels.record import record_backends
from attnkit.core.listeners import LISTENERS
from attnkit.core.masks.base import Mask, as_mask
from attnkit.core.masks.sequences import Causal, Packed
from attnkit.core.scores.kinds import ScaledDot
from attnkit.core.weights import attention_weights
from attnkit.interop.transformers_masks import MaskMaker, MaskTensor

NAME = "attnkit"


def register_transformers() -> None:
    """Make `attn_implementation="attnkit"` a choice of transformers' models.

        attnkit.interop.register_transformers()
        model = AutoModel.from_pretrained(name, attn_implementation="attnkit")
        model.set_attn_implementation("attnkit")  # or for an existing model

    Every model that uses transformers' `AttentionInterface` then computes
    softmax(scale · q·k + position bias) v by `attend`, with its softcap, its sinks, its dropout in
    training and its grouped heads. A causal mask, a sliding window, packed sequences (found by
    transformers from `position_ids`, or given as `cu_seq_lens_q`) and padding become `Causal`,
    `Window`, `Packed`, `Padding` and combinations by `&`, so that kernels skip what these do not
    allow. Every other mask is evaluated to booleans, as transformers does for "sdpa"; so are
    the masks of one query and those of traced and compiled models.

    Unlike with "eager", a query that may look nowhere, such as left padding, gets exactly 0.

    `record_masks(model)` shows which mask and which kernel each layer ran with.

    Raises:
        ImportError: transformers is not installed.
        ValueError (in the model's forward): the model has what `attend` does not compute: attention
            sinks that are no logits of heads (`sinks`), or a choice of keys by `indices` or
            `block_indices`.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            "register_transformers() needs transformers: pip install transformers"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, MaskMaker(masking_utils))


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
    """Compute attention for `AttentionInterface`: the output [batch, queries, heads, value_dim],
    and the weights if requested.

    Without a mask it is causal where "sdpa" is: if `is_causal`, or else the module's attribute, is
    true and there is more than one query. `sliding_window` is not read: the mask includes it.
    """
    _check_options(module, options)
    if query.shape[0] != key.shape[0]:  # such as learned queries
        query = query.expand(key.shape[0], -1, -1, -1)
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
        output = attend(*given, score=score, mask=mask, bias=bias, dropout_p=dropout, sink=s_aux)
    if joins_items:
        output = output[0].unflatten(1, (len(query), -1)).transpose(0, 1)
    weights = None
    if output_attentions:
        weights = attention_weights(query, key, score=score, mask=mask, bias=bias, sink=s_aux)
    return output.transpose(1, 2).contiguous(), weights


_REFUSED = {
    "sinks": "attention sinks",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
}
"""The arguments that change the output and are not computed."""


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: {type(module).__name__} has {what}, which attn_implementation="
                f'"{NAME}" does not compute; use model.set_attn_implementation("eager")'
            )


def _mask_and_bias(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> tuple[Mask | None, Tensor | None]:
    """Return the mask and the bias: booleans are a mask; numbers are added to the scores."""
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
        expected = [query.shape[0], 1, query.shape[2], key.shape[2]]
        fits = [*attention_mask.shape] == expected
        mask = attention_mask.mask if fits else as_mask(attention_mask.numbers())
    elif attention_mask.is_floating_point():
        mask = None
    else:
        mask = as_mask(attention_mask)
    is_packed = mask is not None and any(part.packs_sequences for part in mask.parts)
    if packed is not None and len(packed.lengths) > 1 and not is_packed:
        raise ValueError(
            f"cu_seq_lens_q: {len(packed.lengths)} sequences, but the mask of "
            f"{type(module).__name__} does not separate them; give position_ids that begin anew "
            "with each sequence, and no attention_mask"
        )
    return mask, attention_mask if mask is None else None


class MaskCounts:
    """`counts[module][mask, kernel]`: how often each layer ran with which mask and kernel.

    A mask is named by its types, "Causal & Padding", or "none", with "+ bias" if a bias was added.
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

    Compiled modules run uncompiled in this context. `attnkit.record_backends(model)` counts all
    attention of a model, without the masks.
    """
    record = MaskCounts()
    names = {id(module): name for name, module in model.named_modules()}
    with _RECORDS.opened((record, names)), uncompiled():
        yield record


_RECORDS: Opened[tuple[MaskCounts, dict[int, str]]] = Opened("records of masks")


@contextmanager
def _recorded(module: nn.Module, mask: Mask | None, bias: Tensor | None) -> Iterator[None]:
    """Add what runs in this context to the open records."""
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
