"""The pre-norm block of a Transformer decoder."""

from typing import Any

from torch import Tensor, nn

from attnkit.core.cache import KeyValueCache
from attnkit.core.decode_step import attention_step, memory_step
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.multihead import MultiHeadAttention, Positions
from attnkit.core.running import undone_on_error
from attnkit.core.scores.kinds import Score
from attnkit.layers.tokens.block import Activation, make_mlp


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
