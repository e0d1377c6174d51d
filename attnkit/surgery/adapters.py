"""The shared block behind the call signatures of timm's, torchvision's and torch's attention.

Each module takes the arguments of the one that it replaces, converts them to attnkit's (masks are
True where a query may look) and calls its `attention`, a `MultiHeadAttention`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Windows(Adapter):
    """Replaces timm's `WindowAttention` of Swin, for tokens [batch · windows, tokens, dim]."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend; mask: [windows, tokens, tokens], 0 where a token may look and −100 elsewhere.

        It is added, as in timm: if Swin V2 has learned a low temperature, scores differ by so much
        that −100 does not hide them.
        """
        if mask is not None:
            mask = mask[:, None].repeat(len(x) // len(mask), 1, 1, 1)
        return self.attend(x, bias=mask)


class MapWindows(Adapter):
    """Replaces torchvision's `ShiftedWindowAttention`, for maps [batch, height, width, dim].

    Maps are padded to a multiple of the window, shifted in a circle and cut into windows; tokens of
    a window that were not neighbours before the shift have a bias of −100, as in torchvision.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        bias: nn.Module | None,
        *,
        window: tuple[int, int],
        shift: tuple[int, int],
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, bias, mask)
        self.window = window
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        rows, columns = -(-height // self.window[0]), -(-width // self.window[1])
        padded = rows * self.window[0], columns * self.window[1]
        x = F.pad(x, (0, 0, 0, padded[1] - width, 0, padded[0] - height))
        # with one window along a side there is nothing to shift
        shift = [
            step if count > 1 else 0
            for step, count in ((self.shift[0], rows), (self.shift[1], columns))
        ]
        x = x.roll([-s for s in shift], (1, 2))
        apart = None
        if any(shift):
            region = _regions(padded, self.window, shift, x.device)
            region = self._cut(region[None, ..., None])[..., 0]
            apart = -100.0 * (region[:, :, None] != region[:, None]).to(x.dtype)
            apart = apart[:, None].repeat(len(x), 1, 1, 1)
        windows = self.attend(self._cut(x), bias=apart)
        windows = windows.unflatten(1, self.window).unflatten(0, (len(x), rows, columns))
        x = windows.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x.roll(shift, (1, 2))[:, :height, :width].contiguous()

    def _cut(self, maps: Tensor) -> Tensor:
        """Cut [batch, height, width, dim] into [batch · windows, tokens, dim]."""
        cut = maps.unflatten(2, (-1, self.window[1])).unflatten(1, (-1, self.window[0]))
        return cut.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def _regions(
    size: tuple[int, int], window: tuple[int, int], shift: list[int], device: torch.device
) -> Tensor:
    """Return the number of the part that each position is of, for parts joined by the shift."""
    sides = []
    for length, cut, moved in zip(size, window, shift, strict=True):
        places = torch.arange(length, device=device)
        sides.append((places >= length - cut).long() + (places >= length - moved).long())
    return 3 * sides[0][:, None] + sides[1]
