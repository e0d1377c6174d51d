"""Attention pooling of tokens to one or a few vectors."""

from typing import Annotated

import torch
from timm.layers import trunc_normal_tf_
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.core.masks.base import Mask
from attnkit.core.masks.sequences import Packed, Padding
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.scores.kinds import Score
from attnkit.layers.transformer import Activation, make_mlp


class AttentionPool(nn.Module):
    """Attention pooling: learned queries look at the tokens.

        y = attention(queries, tokens)
        pooled = y + mlp(norm(y)) with an MLP, else y

    Takes tokens `[batch, tokens, dim]` and returns one vector `[batch, dim]`, or with `num_queries`
    that many, `[batch, num_queries, dim]`. The order of the tokens does not matter. For an item
    without tokens, y is the bias of the output projection.

    This is the pooling of Set Transformer (Lee et al. 2019) without its residual query and row-wise
    feed-forward layer. With one query and an MLP it is the "MAP head" of Zhai et al. 2022 (Scaling
    Vision Transformers) and timm's `AttentionPoolLatent`.

    Args:
        dim: channels of the tokens and of the output.
        num_heads: number of heads, a divisor of `dim`.
        num_queries: number of vectors to pool into; None: one, without a dimension for it.
        mlp_ratio: the MLP's width over `dim`; None: neither MLP nor norm.
        score: as in `MultiHeadAttention`.
        qkv_bias: whether the input projections add a bias.
        activation: activation of the MLP, "gelu" or its approximation "gelu_tanh"; None: "gelu".
        norm_eps: epsilon of the norm before the MLP; None: 1e-6.
        dropout_p: dropout of the attention weights, in training only.
        backend: the attention kernel, as in `attnkit.attend`.

    Raises:
        ValueError: sizes that do not divide or are not positive, an option of the MLP without one,
            tokens or a mask that do not fit.
        TypeError: a mask that is neither an attnkit mask nor boolean.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_queries: int | None = None,
        mlp_ratio: float | None = None,
        score: str | Score | nn.Module = "scaled_dot",
        qkv_bias: bool = True,
        activation: Activation | None = None,
        norm_eps: float | None = None,
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        at_least(1, num_queries=num_queries)
        self.num_queries = num_queries
        self.query = nn.Parameter(torch.empty(1, num_queries or 1, dim))
        self.attention = MultiHeadAttention(
            dim,
            num_heads,
            key_dim=dim,
            bias=qkv_bias,
            score=score,
            dropout_p=dropout_p,
            backend=backend,
        )
        self.norm: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if mlp_ratio is not None:
            self.norm = nn.LayerNorm(dim, eps=1e-6 if norm_eps is None else norm_eps)
            self.mlp = make_mlp(dim, mlp_ratio, activation=activation or "gelu")
        else:
            for name, given in (("activation", activation), ("norm_eps", norm_eps)):
                if given is not None:
                    raise ValueError(
                        f"{name}: only the MLP has one, got {given!r} without mlp_ratio"
                    )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the queries from a truncated normal distribution."""
        trunc_normal_tf_(self.query, std=self.query.shape[2] ** -0.5)

    def forward(
        self,
        tokens: Annotated[Tensor, "batch tokens dim"],
        mask: Mask | Annotated[Tensor, "batch tokens", bool] | None = None,
    ) -> Annotated[Tensor, "batch dim"] | Annotated[Tensor, "batch queries dim"]:
        """Return the pooled vector, or vectors, of each item.

        Args:
            mask: which tokens count: booleans, True = real, or an attnkit mask, such as
                `Padding(lengths)`, from the queries to the tokens. With `Packed(queries, lengths)`,
                the tokens [1, tokens, dim] are those of several items, concatenated, and each item
                has as many queries as without a mask.
        """
        if tokens.ndim != 3 or tokens.shape[2] != self.query.shape[2]:
            raise ValueError(
                f"tokens: expected [batch, tokens, {self.query.shape[2]}], got {list(tokens.shape)}"
            )
        if isinstance(mask, Tensor):
            if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
                raise ValueError(
                    f"mask: expected booleans {list(tokens.shape[:2])}, True = real, or an attnkit "
                    f"mask, got {mask.dtype} {list(mask.shape)}"
                )
            mask = Padding(mask)
        if isinstance(mask, Packed):
            query = self.query.repeat(1, len(mask.lengths), 1)
            pooled = self.attention(query, tokens, mask=mask).reshape(-1, *self.query.shape[1:])
        else:
            query = self.query.expand(tokens.shape[0], -1, -1)
            pooled = self.attention(query, tokens, mask=mask)
        if self.norm is not None and self.mlp is not None:
            pooled = pooled + self.mlp(self.norm(pooled))
        return pooled.squeeze(1) if self.num_queries is None else pooled
