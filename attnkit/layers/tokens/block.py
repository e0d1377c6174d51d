"""The pre-norm transformer block and its MLP."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args

from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from attnkit.core.arguments import choice
from attnkit.core.masks.sequences import Packed
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.normalizers import Normalizer
from attnkit.core.scores.kinds import Score

Activation = Literal["gelu", "gelu_tanh"]


def make_mlp(
    dim: int, mlp_ratio: float, *, activation: Activation = "gelu", dropout_p: float = 0.0
) -> nn.Module:
    """Return an MLP: linear, GELU (exact or its tanh approximation), linear; dropout after both."""
    choice(get_args(Activation), activation=activation)
    if round(dim * mlp_ratio) < 1:
        raise ValueError(
            f"mlp_ratio: expected at least one hidden channel, got {mlp_ratio} with dim {dim}"
        )
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    gelu: Any = partial(nn.GELU, approximate=approximate)
    return Mlp(dim, round(dim * mlp_ratio), act_layer=gelu, drop=dropout_p)


class TransformerBlock(nn.Module):
    """Pre-norm transformer block (Xiong et al. 2020; Dosovitskiy et al. 2021).

        x = x + drop_path(scale · dropout(attention(norm(x))))
        x = x + drop_path(scale · mlp(norm(x)))

    Tokens `[batch, tokens, dim]` in and out.

    Args:
        mlp_ratio: the MLP's width over `dim`.
        qkv_bias, qk_norm, score, normalizer, backend: options of the attention, as in
            `MultiHeadAttention`.
        layer_scale: initial value of the per-channel scales (CaiT, Touvron et al. 2021); None: no
            scales.
        dropout_p: dropout after the attention and inside the MLP, in training only.
        attention_dropout_p: dropout of the attention weights, in training only.
        drop_path: probability that a sample skips a branch (Huang et al. 2016), in training only.
        activation: activation of the MLP, "gelu" or its approximation "gelu_tanh".
        norm_eps: epsilon of every layer norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        score: str | Score | nn.Module = "scaled_dot",
        normalizer: str | Normalizer | nn.Module = "softmax",
        layer_scale: float | None = None,
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        drop_path: float = 0.0,
        activation: Activation = "gelu",
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = MultiHeadAttention(
            dim,
            num_heads,
            bias=qkv_bias,
            qk_norm=qk_norm,
            norm_eps=norm_eps if qk_norm else None,
            score=score,
            normalizer=normalizer,
            dropout_p=attention_dropout_p,
            backend=backend,
        )
        self.dropout = nn.Dropout(dropout_p)
        self.attention_scale = _layer_scale(dim, layer_scale)
        self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = make_mlp(dim, mlp_ratio, activation=activation, dropout_p=dropout_p)
        self.mlp_scale = _layer_scale(dim, layer_scale)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self,
        tokens: Annotated[Tensor, "batch tokens dim"],
        *,
        query_tokens: int | Annotated[Tensor, "queries", int] | None = None,
        mask: Any = None,
        positions: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Annotated[Tensor, "batch queries dim"]:
        """Return the block's output for all tokens or for some of them.

        Args:
            query_tokens: number of first tokens, or indices of the tokens, to compute; None: all.
                Every token still gives a key and a value, but only these tokens are queries and
                pass the MLP. The result equals `block(tokens)[:, :query_tokens]` at a fraction of
                the cost. `mask` and `positions` then have that many queries.
            mask: as in `MultiHeadAttention`. The sequences of a `Packed` mask are the samples that
                `drop_path` drops.
            positions: as in `MultiHeadAttention`.
        """
        normed = self.attention_norm(tokens)
        if query_tokens is None:
            update = self.attention(normed, mask=mask, positions=positions)
        else:
            rows = slice(query_tokens) if isinstance(query_tokens, int) else query_tokens
            tokens = tokens[:, rows]
            update = self.attention(normed[:, rows], normed, mask=mask, positions=positions)
        tokens = tokens + self._drop_path(self.attention_scale(self.dropout(update)), mask)
        return tokens + self._drop_path(self.mlp_scale(self.mlp(self.mlp_norm(tokens))), mask)

    def _drop_path(self, branch: Tensor, mask: Any) -> Tensor:
        if not (
            self.training and isinstance(mask, Packed) and isinstance(self.drop_path, DropPath)
        ):
            return self.drop_path(branch)
        lengths = mask.lengths.to(branch.device)
        factors = self.drop_path(branch.new_ones(len(lengths), 1))
        return branch * factors.repeat_interleave(lengths, dim=0, output_size=branch.shape[1])


def _layer_scale(dim: int, init_value: float | None) -> nn.Module:
    return nn.Identity() if init_value is None else LayerScale(dim, init_value)
