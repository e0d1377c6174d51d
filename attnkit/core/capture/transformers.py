"""Observation of attention that transformers' interface computes without torch's function.

Models of transformers get the function that their configuration names from `AttentionInterface`.
The function of "sdpa" calls torch's and that of "attnkit" calls `attend`; both are observed
elsewhere. "eager", "flex_attention", the flash kernels and functions that users register are
observed here. Nothing of transformers is imported.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from attnkit.core.capture.calls import AttentionCall
from attnkit.core.check import check_inputs
from attnkit.core.inputs import Inputs
from attnkit.core.listeners import (
    LISTENERS,
    Seen,
    is_recomputed,
    notify,
    notify_missed,
    without_listeners,
)
from attnkit.core.masks.base import Mask
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.running import interface_handled
from attnkit.core.scores.kinds import ScaledDot

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def watch_interface() -> AbstractContextManager[None]:
    """Notify the listeners in the block of attention that transformers' interface computes."""
    return interface_handled(_observed)


def _observed(
    name: str,
    function: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None = None,
    *args: Any,
    **options: Any,
) -> tuple:
    """Call the function, which returns [batch, queries, heads, value_dim] and more, and notify the
    listeners."""
    given = module, query, key, value, attention_mask, *args
    is_packed = query.shape[2] == 1 and query.shape[1] != key.shape[1]
    # with one query "sdpa" may pass the heads to torch as queries
    is_torchs = name in ("sdpa", None) and not (is_packed and attention_mask is not None)
    if is_torchs or name == "attnkit" or not LISTENERS.get() or is_recomputed():
        return function(*given, **options)
    with without_listeners() as listeners:
        output, *rest = function(*given, **options)
        seen = output.transpose(1, 2)
        inputs = None if args else _inputs(*given, **options)
        if inputs is not None and _explains(inputs, seen):
            notify(listeners, Seen("transformers", inputs, seen))
            output = seen.transpose(1, 2)
        else:
            notify_missed(listeners)
    return output, *rest


def _inputs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Inputs:
    """Return the arguments by their usual meaning; `_explains` checks it against the output."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask: Mask | Tensor | None = None
    bias = position_bias
    if isinstance(attention_mask, BlockMask):
        sizes = query.shape[0], query.shape[1], num_queries, num_keys
        mask = create_mask(attention_mask.mask_mod, *sizes, device=str(query.device))
    elif attention_mask is None:
        is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        mask = Causal("bottom_right") if is_causal and num_queries > 1 else None
    elif attention_mask.ndim == 2:
        mask = Padding(attention_mask.bool())
        if is_causal or getattr(module, "is_causal", False):
            mask = mask & Causal("bottom_right")
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask[..., :num_keys]
    else:
        added = attention_mask[..., :num_keys]
        bias = added if bias is None else bias + added
    return check_inputs(
        query,
        key,
        value,
        score=ScaledDot(scale=scaling, softcap=softcap),
        mask=mask,
        bias=bias,
        dropout_p=dropout,
        sink=s_aux,
    )


def _explains(inputs: Inputs, output: Tensor) -> bool:
    """Return whether the output's first and last rows are A V; rows of padding may be 0."""
    if inputs.dropout_p:
        return True
    rows = [0, inputs.num_queries - 1]
    with torch.no_grad():
        weights = AttentionCall("", "", inputs, output).weights(rows)
        value = inputs.repeated_heads()[1].to(weights.dtype)
        expected = torch.einsum("bhik,bhkd->bhid", weights, value)
        actual = output[:, :, rows].to(weights.dtype)
        error = (actual - expected).abs().masked_fill(actual == 0, 0.0)
        largest = expected.abs().amax()
    return bool((error <= _TOLERANCE.get(inputs.query.dtype, 3e-2) * (1 + largest)).all())
