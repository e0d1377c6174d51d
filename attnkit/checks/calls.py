"""Adapters that call a module with tokens and a mask, whatever its own forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.masks.sequences import Padding
from attnkit.core.multihead import MultiHeadAttention

Call = Callable[..., Tensor]
"""(module, tokens) or (module, tokens, mask) -> output.

tokens [batch, tokens, dim]; mask, boolean [batch, tokens], always a tensor, True = a real token;
output [batch, tokens, channels].
"""


def on_complete_graph(module: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """Call a graph module, `module(x, edge_index)`, on the batch as one graph of complete graphs.

    Each item is a complete graph with self-loops, less the edges that leave masked tokens: the
    edges j → i of all i and of the j with mask[j], in torch_geometric's order (source row 0).
    x is [batch · tokens, dim]; the output comes back as [batch, tokens, channels].
    """
    batch, num_tokens, _ = tokens.shape
    nodes = torch.arange(batch * num_tokens, device=tokens.device).view(batch, num_tokens)
    sources = nodes[:, None, :].expand(-1, num_tokens, -1)
    targets = nodes[:, :, None].expand(-1, -1, num_tokens)
    edges = mask[:, None, :].expand(-1, num_tokens, -1)
    edge_index = torch.stack([sources[edges], targets[edges]])
    return module(tokens.flatten(0, 1), edge_index).unflatten(0, (batch, num_tokens))


def default_call(module: nn.Module) -> Call:
    """Return the call of a known module of torch or attnkit, else `module(tokens)`."""
    if isinstance(module, MultiHeadAttention):
        return _attnkit_multihead
    if isinstance(module, nn.MultiheadAttention):
        return _torch_multihead
    if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return _torch_encoder
    return _tokens_alone


def takes_mask(call: Call) -> bool:
    """Return whether a call takes (module, tokens, mask) rather than only (module, tokens)."""
    if not callable(call):
        raise TypeError(f"call: expected a function, got {type(call).__name__}")
    signature = inspect.signature(call)
    for num_arguments in (3, 2):
        try:
            signature.bind(*range(num_arguments))
        except TypeError:
            continue
        return num_arguments == 3
    raise TypeError(
        f"call: expected to be called as (module, tokens) or (module, tokens, mask), "
        f"got a function of {signature}"
    )


def _attnkit_multihead(module: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    return module(tokens, mask=Padding(mask))


def _torch_multihead(module: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    x = tokens if module.batch_first else tokens.transpose(0, 1)
    output, _ = module(x, x, x, key_padding_mask=~mask, need_weights=False)
    return output if module.batch_first else output.transpose(0, 1)


def _torch_encoder(module: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    layer = module if isinstance(module, nn.TransformerEncoderLayer) else module.layers[0]
    if layer.self_attn.batch_first:
        return module(tokens, src_key_padding_mask=~mask)
    return module(tokens.transpose(0, 1), src_key_padding_mask=~mask).transpose(0, 1)


def _tokens_alone(module: nn.Module, tokens: Tensor) -> Tensor:
    return module(tokens)
