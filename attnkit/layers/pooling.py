"""From tokens to one vector by attention."""

import torch
from timm.layers import trunc_normal_tf_
from torch import Tensor, nn

from attnkit.core.multihead import MultiHeadAttention
from attnkit.layers.block import Activation, make_mlp


class AttentionPooling(nn.Module):
    """Attention pooling: the block with one learned query.

        y = attention(query, tokens)
        pooled = y + mlp(norm(y))

    Tokens `[batch, tokens, dim]` in, `[batch, dim]` out. The "MAP head" of Zhai et al. 2022
    (Scaling Vision Transformers), after Lee et al. 2019 (Set Transformer).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        activation: Activation = "gelu",
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(1, 1, dim))
        self.attention = MultiHeadAttention(dim, num_heads, bias=qkv_bias, backend=backend)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = make_mlp(dim, mlp_ratio, activation=activation)
        trunc_normal_tf_(self.query, std=dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = self.attention(self.query.expand(tokens.shape[0], -1, -1), tokens)
        return (pooled + self.mlp(self.norm(pooled))).squeeze(1)
