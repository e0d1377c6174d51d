"""The shared block where few tokens ask, keys are fewer than queries, or tokens lie in maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnkit.core.masks.base import Mask
from attnkit.core.multihead import MultiHeadAttention
from attnkit.surgery.adapters import Adapter
from attnkit.surgery.windows import MapWindows


class Blocks(Adapter):
    """In the place of timm's attention of NesT and VOLO: tokens [batch, rows, columns, dim].

    all_see_all: whether all tokens of an image are one sequence; else each row is one.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        *,
        all_see_all: bool,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, mask=mask)
        self.all_see_all = all_see_all

    def forward(self, x: Tensor) -> Tensor:
        start = 1 if self.all_see_all else 0
        return self.attend(x.flatten(start, start + 1)).view(x.shape)


class FirstToken(Adapter):
    """In the place of the class attention of VOLO and CrossViT: the first token asks
    all, and [batch, 1, dim] is the output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(x[:, :1], x, x, mask=self.mask))


class FewerKeys(Adapter):
    """In the place of the attention of PVT v2 and of Twins to a smaller map of keys.

    reduce: of maps [batch, dim, height, width] to smaller ones; None: as they are.
    norm: of the tokens of the smaller map.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        dropout: nn.Module,
        reduce: nn.Module | None,
        norm: nn.Module | None,
        mask: Mask | None = None,
    ) -> None:
        super().__init__(attention, dropout, mask=mask)
        self.reduce = reduce
        self.norm = norm

    def forward(self, x: Tensor, feat_size: Sequence[int]) -> Tensor:
        keys = x
        if self.reduce is not None and self.norm is not None:
            maps = x.transpose(1, 2).unflatten(2, tuple(feat_size))
            keys = self.norm(self.reduce(maps).flatten(2).transpose(1, 2))
        return self.dropout(self.attention(x, keys, keys, mask=self.mask))


class Groups(MapWindows):
    """In the place of Twins' attention in windows: tokens [batch, height · width, dim]."""

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:  # type: ignore[override]
        return super().forward(x.unflatten(1, tuple(size))).flatten(1, 2)


class Latent(Adapter):
    """In the place of timm's `AttentionPoolLatent`, as in SigLIP: learned queries ask all tokens.

    theirs: the module, whose queries, positions, norm and MLP it takes over.
    """

    def __init__(self, attention: MultiHeadAttention, theirs: Any, mask: Mask | None) -> None:
        super().__init__(attention, theirs.proj_drop, mask=mask)
        self.latent, self.pos_embed, self.pool = theirs.latent, theirs.pos_embed, theirs.pool
        self.norm, self.mlp = theirs.norm, theirs.mlp

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.pos_embed is not None:
            x = x + self.pos_embed.to(x.dtype)
        queries = self.latent.expand(len(x), -1, -1)
        mask, bias = attn_mask, None
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            mask, bias = None, attn_mask
        x = self.dropout(self.attention(queries, x, x, mask=self._both(mask), bias=bias))
        x = x + self.mlp(self.norm(x))
        return {"token": x[:, 0], "avg": x.mean(dim=1)}.get(self.pool, x)
