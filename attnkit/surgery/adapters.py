"""The shared block behind the call signatures of timm's, torchvision's and torch's attention.

Each module takes the arguments of the one that it replaces, converts them to attnkit's (masks are
True where a query may look) and calls its `attention`, a `MultiHeadAttention`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.masks.base import Mask, as_mask
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.multihead import MultiHeadAttention, Positions

Given = Mask | Tensor | None


def ours(attn_mask: Tensor | None, is_causal: bool) -> tuple[Given, Tensor | None]:
    """Return torch's `attn_mask`, booleans or a bias, as attnkit's mask and bias."""
    causal = Causal() if is_causal else None
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return causal, attn_mask
    return attn_mask if causal is None else as_mask(attn_mask) & causal, None


class Adapter(nn.Module):
    """The base class of the adapters.

    attention: the shared block.
    dropout: dropout of the block's output, from the replaced module.
    bias: a module whose `forward()` returns a bias by position, [1, heads, tokens, tokens].
    mask: an attnkit mask in addition to those of the network.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        bias: nn.Module | None = None,
        mask: Mask | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.dropout = dropout
        self.bias = bias
        self.mask = mask

    def attend(
        self,
        tokens: Tensor,
        mask: Given = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
    ) -> Tensor:
        """Return self-attention of tokens [batch, tokens, dim] with both masks and both biases."""
        if self.bias is not None:
            own = self.bias()
            bias = own if bias is None else own + bias
        output = self.attention(tokens, mask=self._both(mask), bias=bias, positions=positions)
        return self.dropout(output)

    def attend_masked(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        positions: Positions | None = None,
    ) -> Tensor:
        """Return `attend` with a mask as in torch's attention function: booleans, or a bias."""
        return self.attend(x, *ours(attn_mask, is_causal), positions)

    def _both(self, mask: Given) -> Given:
        if self.mask is None or mask is None:
            return self.mask if mask is None else mask
        return as_mask(mask) & self.mask

    def set_window_size(self, window_size: Any) -> None:
        """Change the window, or grid of tokens, of the own bias; timm's `set_input_size` calls."""
        if self.bias is not None:
            self.bias.set_window_size(window_size)  # type: ignore[operator]

    def extra_repr(self) -> str:
        return "" if self.mask is None else f"mask={self.mask}"


class Tokens(Adapter):
    """Replaces timm's `Attention`, as in its Vision Transformers."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self.attend_masked(x, attn_mask, is_causal)


class TokensWithRotary(Adapter):
    """Replaces timm's `AttentionRope` and `EvaAttention`: the network turns positions into angles,
    and the tokens before the grid have none."""

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        *,
        num_prefix_tokens: int,
        rotate_half: bool,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, mask=mask)
        self.num_prefix_tokens = num_prefix_tokens
        self.rotate_half = rotate_half

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        positions = None if rope is None else partial(self._turn, rope)
        return self.attend_masked(x, attn_mask, is_causal, positions)

    def _turn(self, rope: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        from timm.layers import apply_rot_embed_cat

        sizes = [self.num_prefix_tokens, query.shape[2] - self.num_prefix_tokens]
        turned = []
        for tensor in (query, key):
            prefix, grid = tensor.split(sizes, dim=2)
            grid = apply_rot_embed_cat(grid, rope, half=self.rotate_half)
            turned.append(torch.cat([prefix, grid], dim=2).to(tensor.dtype))
        return turned[0], turned[1]


class TokensWithBias(Adapter):
    """Replaces BEiT's and timm's relative-position `Attention`. A bias shared by all layers is
    added to its own bias, or replaces it.

    adds_shared: whether a shared bias is added to an own one; else it is not read.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        bias: nn.Module | None = None,
        *,
        adds_shared: bool,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, bias, mask)
        self.adds_shared = adds_shared

    def forward(
        self,
        x: Tensor,
        shared_rel_pos_bias: Tensor | None = None,
        shared_rel_pos: Tensor | None = None,
    ) -> Tensor:
        shared = shared_rel_pos if shared_rel_pos_bias is None else shared_rel_pos_bias
        reads_shared = self.bias is None or self.adds_shared
        return self.attend(x, bias=shared if reads_shared else None)


class FirstToken(Adapter):
    """Replaces the class attention of VOLO and CrossViT: the first token attends to all, and the
    output is [batch, 1, dim]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(x[:, :1], x, x, mask=self.mask))


class QueryKeyValue(Adapter):
    """Replaces torch's `nn.MultiheadAttention`, as in torchvision's VisionTransformer.

    batch_first: as in torch's.
    """

    # torch's TransformerEncoderLayer reads it and then avoids its fast path, which calls no module
    # and reads weights instead
    in_proj_bias = None

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        *,
        batch_first: bool,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, mask=mask)
        self.batch_first = batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention as torch's module does, but return weights before dropout.

        Raises:
            RuntimeError: `is_causal=True`, a hint about `attn_mask`, without an `attn_mask`, as in
                torch.
            ValueError: tokens without a batch.
        """
        if query.ndim != 3:
            raise ValueError(f"query: expected a batch of tokens, got {list(query.shape)}")
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal: expected an attn_mask with it, of which it is a hint")
        is_self = key is query and value is query
        if not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        given = (query,) if is_self else (query, key, value)
        options = self._options(query, key_padding_mask, attn_mask)
        output = self.dropout(self.attention(*given, **options))
        weights = None
        if need_weights:
            weights = self.attention.attention_weights(*given, **options)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        return output if self.batch_first else output.transpose(0, 1), weights

    def _options(
        self, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        """Return torch's masks, True or −inf where no query may look, as a mask and a bias."""
        mask, bias = self.mask, None
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (len(query), -1))
        if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
            bias, key_padding_mask = key_padding_mask[:, None, None], None
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            bias = attn_mask if bias is None else bias + attn_mask
            attn_mask = None
        hidden = [None if m is None else ~m for m in (key_padding_mask, attn_mask)]
        if hidden[0] is not None:
            padding = Padding(hidden[0])
            mask = padding if mask is None else mask & padding
        if hidden[1] is not None:
            mask = as_mask(hidden[1]) if mask is None else mask & hidden[1]
        return {"mask": mask, "bias": bias}
