"""Attention by torch's `scaled_dot_product_attention`, of any caller."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias

from attnkit.core.check import check_inputs
from attnkit.core.inputs import Inputs
from attnkit.core.listeners import Seen, tell, tell_missed, unheard
from attnkit.core.masks.base import Mask, as_mask
from attnkit.core.masks.sequences import Causal


def told_product(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What torch's function returns, of which the listeners are told."""
    with unheard() as listeners:
        output = F.scaled_dot_product_attention(*args, **kwargs)
        if output.is_nested:
            tell_missed(listeners, is_nested=True)
            return output
        inputs = sdpa_inputs(*args, **kwargs)
        # the caller goes on with a view of what is told, so that this has a gradient
        seen = output.reshape(*inputs.query.shape[:3], output.shape[-1])
        tell(listeners, Seen("scaled_dot_product_attention", inputs, seen))
    return seen.view(output.shape)


def sdpa_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Inputs:
    """The arguments of torch's function as attnkit's, with four dimensions.

    Three are [batch, tokens, channels], one head, but with enable_gqa [heads, tokens, channels]; of
    more than four those before the heads are one batch.
    """
    ndim = max(query.ndim, key.ndim, value.ndim)
    tensors = [tensor[(None,) * (ndim - tensor.ndim)] for tensor in (query, key, value)]
    if ndim == 3 and not enable_gqa:
        tensors = [tensor.unsqueeze(1) for tensor in tensors]
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unsqueeze(1)
    tensors = [tensor[(None,) * (4 - tensor.ndim)] for tensor in tensors]
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    heads = [tensor.shape[-3] for tensor in tensors]
    heads = [max(heads) if heads[0] == 1 else heads[0], *[max(heads[1:])] * 2]
    query, key, value = (
        tensor.expand(*batch, num_heads, -1, -1).flatten(0, -4)
        for tensor, num_heads in zip(tensors, heads, strict=True)
    )
    mask: Mask | Tensor | None = Causal("top_left") if is_causal else None
    bias = None
    if attn_mask is not None:
        if len(batch) > 1 and attn_mask.ndim > 3:
            attn_mask = attn_mask.expand(*batch, -1, -1, -1).flatten(0, -4)
        if attn_mask.dtype == torch.bool and not isinstance(attn_mask, CausalBias):
            mask = attn_mask if mask is None else mask & as_mask(attn_mask)
        else:
            bias = attn_mask
    return check_inputs(
        query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=min(dropout_p, 0.999)
    )
