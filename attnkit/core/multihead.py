"""Multi-head attention: project, split into heads, attend, merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.attend import attend
from attnkit.core.backends import named_backend
from attnkit.core.learned_scores import learned_score
from attnkit.core.masks import Mask
from attnkit.core.score import Score
from attnkit.core.weights import Indices, attention_weights

__all__ = ["MultiHeadAttention", "Positions"]

Positions = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Where tokens are, told to queries and keys: (query, key) -> (query, key), as rotary does."""


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al., Attention Is All You Need, 2017).

        output = [head_1 … head_H] W_out,   head_h = attend(x W_q,h, y W_k,h, z W_v,h)

    Self-attention is `block(x)`, cross-attention `block(x, y)`. One fused projection gives
    queries, keys and values where they have one input. With fewer key/value heads than heads it is
    grouped-query attention (Ainslie et al. 2023), with `qk_norm` queries and keys are
    layer-normalised per head before the product (Dehghani et al. 2023).

    Unlike torch's module: batch first always; True in a mask = may look; the output alone is
    returned, always a tensor; a row that may look nowhere is 0 before the output projection; the
    same kernel runs in training and evaluation.

    Args:
        dim: channels of the queries' input and of the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`; None: as many as `num_heads`.
        head_dim: channels of a head; None: dim / num_heads.
        key_dim: channels of the keys' input; None: `dim`.
        value_dim: channels of the values' input; None: `key_dim`.
        bias: whether the input projections add a bias.
        out_bias: whether the output projection does.
        qk_norm: whether to normalise queries and keys.
        norm_eps: the epsilon of that normalisation.
        score: a name: "scaled_dot", "dot", or with parameters per head that the block learns
            "general", "additive", "cosine" and "gaussian"; a `Score` without tensors, for a
            softcap; or a module whose `forward()` returns a `Score`, such as those of
            `attnkit.learned_scores`, which is then a submodule.
        dropout_p: the share of weights dropped in training; none in evaluation.
        backend: the kernel, as in `attend`.

    Raises:
        ValueError: sizes that do not divide or are not positive.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        score: str | Score | nn.Module = "scaled_dot",
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1:
            raise ValueError(f"dim and num_heads: expected at least 1, got {dim} and {num_heads}")
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"num_heads: {num_heads} does not divide dim {dim}")
            head_dim = dim // num_heads
        elif head_dim < 1:
            raise ValueError(f"head_dim: expected at least 1, got {head_dim}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: {num_kv_heads} does not divide num_heads {num_heads}")
        if not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p: expected 0 <= dropout_p < 1, got {dropout_p}")
        named_backend(backend)
        key_dim = dim if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dropout_p = dropout_p
        self.backend = backend
        self.sizes = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
        self.is_fused = dim == key_dim == value_dim
        if self.is_fused:
            self.in_proj = nn.Linear(dim, sum(self.sizes), bias=bias)
        else:
            self.query_proj = nn.Linear(dim, self.sizes[0], bias=bias)
            self.key_proj = nn.Linear(key_dim, self.sizes[1], bias=bias)
            self.value_proj = nn.Linear(value_dim, self.sizes[2], bias=bias)
        self.query_norm = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.score = learned_score(score, num_heads, head_dim)
        self.out_proj = nn.Linear(self.sizes[0], dim, bias=out_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform per projection, as torch's module; biases 0."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                sizes = self.sizes if name == "in_proj" else [module.out_features]
                for weight in module.weight.split(sizes):
                    nn.init.xavier_uniform_(weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
    ) -> Tensor:
        """Attend from the tokens of `query` to those of `key`.

        Args:
            query: [batch, queries, dim].
            key: [batch, keys, key_dim]; None: `query`, self-attention.
            value: [batch, keys, value_dim]; None: `key`.
            mask, bias: as in `attend`.
            positions: applied to queries and keys as heads, [batch, heads, tokens, head_dim].

        Returns:
            [batch, queries, dim].
        """
        heads = self._project(query, key, value, positions)
        output = attend(
            *heads,
            score=self._score_now(),
            mask=mask,
            bias=bias,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def attention_weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        rows: Indices = None,
        heads: Indices = None,
    ) -> Tensor:
        """The weights that `forward` uses on the same arguments, before dropout.

        Returns:
            [batch, len(heads), len(rows), keys]; see `attnkit.attention_weights`.
        """
        projected_query, projected_key, _ = self._project(query, key, value, positions)
        return attention_weights(
            projected_query,
            projected_key,
            score=self._score_now(),
            mask=mask,
            bias=bias,
            rows=rows,
            heads=heads,
        )

    def _score_now(self) -> Score:
        return self.score() if isinstance(self.score, nn.Module) else self.score

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, positions: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key is None and value is not None:
            raise ValueError("value: given without key")
        key = query if key is None else key
        value = key if value is None else value
        heads: Sequence[Tensor]
        # One product for all projections that read the same tokens. They are split on the last
        # dimension: the backward of that is one concatenation, in the layout the product wants.
        if not self.is_fused:
            heads = self.query_proj(query), self.key_proj(key), self.value_proj(value)
        elif value is not key:
            heads = tuple(map(F.linear, (query, key, value), *self._parameters_of(self.sizes)))
        elif key is not query:
            weights, biases = self._parameters_of([self.sizes[0], sum(self.sizes[1:])])
            key_value = F.linear(key, weights[1], biases[1])
            heads = F.linear(query, weights[0], biases[0]), *key_value.split(self.sizes[1:], dim=-1)
        else:
            heads = self.in_proj(query).split(self.sizes, dim=-1)
        q, k, v = (tokens.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for tokens in heads)
        q, k = self.query_norm(q), self.key_norm(k)
        if positions is not None:
            q, k = positions(q, k)
        return q, k, v

    def _parameters_of(self, sizes: list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        weight, bias = self.in_proj.weight, self.in_proj.bias
        return weight.split(sizes), [None] * len(sizes) if bias is None else bias.split(sizes)
