"""The projections of a multi-head block, from tokens to the heads of queries, keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, divides
from attnkit.core.operators.precision import no_autocast


def reset_linear(layer: nn.Linear) -> None:
    """Initialize the layer with a Xavier-uniform matrix and a bias of 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def matrix_of(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return the matrix [in, out] by which a layer without bias multiplies rows [rows, in].

    It is the layer's output for the unit vectors, not its weight, so that a hook, an adapter or
    another layer in its place is included; these must be linear, too.
    """
    dtype = next(layer.parameters(), rows).dtype
    with no_autocast(rows):
        return layer(torch.eye(rows.shape[-1], dtype=dtype, device=rows.device))


class Projections(nn.Module):
    """Base class of `MultiHeadAttention`, which documents the arguments: projects tokens to
    queries, keys and values as heads [batch, heads, tokens, head_dim], values with `value_head_dim`
    channels.

    Tokens may lack the batch, as the nodes of a graph do; then the heads lack it, too.

    By default there is one fused layer, `in_proj`. With `key_dim` or `value_dim`, for keys and
    values of other tokens, there are `query_proj`, `key_proj` and `value_proj`. With `qk_norm`
    queries and keys are layer-normalized per head. The layers are always called as modules, with
    all tokens, so that hooks, adapters and replacements see everything that they compute.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if norm_eps is not None and not qk_norm:
            raise ValueError(f"norm_eps: only qk_norm=True has one, got {norm_eps} without it")
        at_least(1, dim=dim, num_heads=num_heads, head_dim=head_dim, value_head_dim=value_head_dim)
        if head_dim is None:
            divides("num_heads", num_heads, dim=dim)
            head_dim = dim // num_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        divides("num_kv_heads", num_kv_heads, num_heads=num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        self.key_dim = dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_head_dim]
        self.is_fused = key_dim is None and value_dim is None
        if self.is_fused:
            self.in_proj = nn.Linear(dim, sum(self.sizes), bias=bias)
        else:
            self.query_proj = nn.Linear(dim, self.sizes[0], bias=bias)
            self.key_proj = nn.Linear(self.key_dim, self.sizes[1], bias=bias)
            self.value_proj = nn.Linear(self.value_dim, self.sizes[2], bias=bias)
        eps = 1e-6 if norm_eps is None else norm_eps
        self.query_norm = nn.LayerNorm(head_dim, eps=eps) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head_dim, eps=eps) if qk_norm else nn.Identity()

    def reset_parameters(self) -> None:
        """Initialize each projection Xavier-uniform, as torch's module does; biases 0."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                sizes = self.sizes if name == "in_proj" else [module.out_features]
                for weight in module.weight.split(sizes):
                    nn.init.xavier_uniform_(weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as heads."""
        if not (self.is_fused and query is key is value):
            return self.project_query(query), *self.project_memory(key, value)
        q, k, v = self._parts(query)
        return self._query_heads(q), self._key_heads(k), self._split(v, self.num_kv_heads)

    def project_query(self, query: Tensor) -> Tensor:
        """Return the queries only."""
        return self._query_heads(self._parts(query)[0] if self.is_fused else self.query_proj(query))

    def project_memory(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values only."""
        if self.is_fused:
            _, k, v = self._parts(key)
            v = v if value is key else self._parts(value)[2]
        else:
            k, v = self.key_proj(key), self.value_proj(value)
        return self._key_heads(k), self._split(v, self.num_kv_heads)

    def _parts(self, tokens: Tensor) -> Sequence[Tensor]:
        """Return the fused layer's channels of queries, keys and values.

        They are split along the last dimension, whose backward is one concatenation, in the layout
        that the matrix product reads fastest.
        """
        return self.in_proj(tokens).split(self.sizes, dim=-1)

    def _query_heads(self, q: Tensor) -> Tensor:
        return self.query_norm(self._split(q, self.num_heads))

    def _key_heads(self, k: Tensor) -> Tensor:
        return self.key_norm(self._split(k, self.num_kv_heads))

    def _split(self, projected: Tensor, heads: int) -> Tensor:
        """Return [tokens, heads · channels] as [heads, tokens, channels]."""
        return projected.unflatten(-1, (heads, -1)).transpose(-3, -2)
