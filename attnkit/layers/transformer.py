"""The pre-norm blocks of a Transformer's encoder and decoder, and their MLP."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args

from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from attnkit.core.arguments import choice
from attnkit.core.cache import KeyValueCache
from attnkit.core.decode_step import attention_step, memory_step
from attnkit.core.masks.sequences import Causal, Packed, Padding
from attnkit.core.multihead import MultiHeadAttention, Positions
from attnkit.core.normalizers import Normalizer
from attnkit.core.running import undone_on_error
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


class DecoderBlock(nn.Module):
    """Pre-norm decoder block (Vaswani et al. 2017; norms first as in Xiong et al. 2020).

        x = x + dropout(attention(norm(x)))                  each word sees itself and earlier words
        x = x + dropout(cross_attention(norm(x), memory))    each word sees all of the memory
        x = x + mlp(norm(x))

    Words `[batch, words, dim]` in and out; memory `[batch, positions, memory_dim]`. Torch's
    `nn.TransformerDecoderLayer` with `norm_first=True` is the same function.

    Args:
        memory_dim: channels of the memory; None: `dim`.
        all other arguments: as in `TransformerBlock`, for both attentions.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        memory_dim: int | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        score: str | Score = "scaled_dot",
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        activation: Activation = "gelu",
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.cross_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.attention, self.cross_attention = (
            MultiHeadAttention(
                dim,
                num_heads,
                key_dim=key_dim,
                bias=qkv_bias,
                qk_norm=qk_norm,
                norm_eps=norm_eps if qk_norm else None,
                score=score,
                dropout_p=attention_dropout_p,
                backend=backend,
            )
            for key_dim in (None, dim if memory_dim is None else memory_dim)
        )
        self.dropout = nn.Dropout(dropout_p)
        self.mlp: Any = make_mlp(dim, mlp_ratio, activation=activation, dropout_p=dropout_p)

    def forward(
        self,
        words: Tensor,
        memory: Tensor,
        *,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        memory_mask: Padding | None = None,
    ) -> Tensor:
        """Return the output for all words at once.

        Args:
            bias, positions: bias and positions of the self-attention, as in `MultiHeadAttention`.
            memory_mask: which positions of the memory are real; None: all.
        """
        normed = self.attention_norm(words)
        update = self.attention(normed, mask=Causal(), bias=bias, positions=positions)
        words = words + self.dropout(update)
        update = self.cross_attention(self.cross_norm(words), memory, mask=memory_mask)
        words = words + self.dropout(update)
        return words + self.mlp(self.mlp_norm(words))

    def step(
        self,
        words: Tensor,
        cache: KeyValueCache,
        memory: KeyValueCache,
        *,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        memory_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the output for the next words, `[batch, words, dim]`, which follow the cache.

        There is no causal mask here; only `bias` hides keys. A call that raises leaves the cache
        unchanged.

        Args:
            cache: cache of the self-attention, to which the words are appended.
            memory: the cache that `cross_attention.remember` made of the memory.
            bias, memory_bias: biases added to the scores of the two attentions; −∞ hides a key.
        """
        with undone_on_error(cache):
            update = attention_step(
                self.attention, self.attention_norm(words), cache, bias=bias, positions=positions
            )
            words = words + self.dropout(update)
            update = memory_step(
                self.cross_attention, self.cross_norm(words), memory, bias=memory_bias
            )
            words = words + self.dropout(update)
            return words + self.mlp(self.mlp_norm(words))
