"""Tokens to heads: the projections of a multi-head block to queries, keys and values."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from attnkit.core.arguments import at_least, divides
from attnkit.core.operators.linear import run_linear


class Projections(nn.Module):
    """Queries, keys and values of tokens, as heads [batch, heads, tokens, head_dim]; values with
    channels of another number if `value_head_dim` says so.

    Tokens may lack the batch, as the nodes of a graph do; then the heads lack it too.

    One fused matrix, `in_proj`, where queries, keys and values have as many input channels, else
    `query_proj`, `key_proj` and `value_proj`; with `qk_norm` queries and keys are layer-normalized
    per head. The base of `MultiHeadAttention`, which documents the arguments.
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
        self.is_fused = dim == self.key_dim == self.value_dim
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
        """Xavier-uniform per projection, as torch's module; biases 0."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                sizes = self.sizes if name == "in_proj" else [module.out_features]
                for weight in module.weight.split(sizes):
                    nn.init.xavier_uniform_(weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as heads."""
        q, k, v = self._heads((query, key, value))
        return self.query_norm(q), self.key_norm(k), v

    def project_query(self, query: Tensor) -> Tensor:
        """Queries alone."""
        if self.is_fused:
            query = run_linear(self.in_proj, query, slice(self.sizes[0]))
        else:
            query = run_linear(self.query_proj, query)
        return self.query_norm(query.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2))

    def project_memory(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone."""
        _, k, v = self._heads((None, key, value))
        return self.key_norm(k), v

    def _heads(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """The projections of the inputs in turn, None of None."""
        num_heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        return [
            None if tokens is None else tokens.unflatten(-1, (heads, -1)).transpose(-3, -2)
            for tokens, heads in zip(self._projected(inputs), num_heads, strict=True)
        ]

    def _projected(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self.is_fused:
            projections = (self.query_proj, self.key_proj, self.value_proj)
            return [
                None if tokens is None else run_linear(projection, tokens)
                for projection, tokens in zip(projections, inputs, strict=True)
            ]
        query, key, value = inputs
        if query is not None and query is key is value:
            return list(self._split(run_linear(self.in_proj, query)))
        # One product for neighbours that read the same tokens. They are split on the last
        # dimension: the backward of that is one concatenation, in the layout the product wants.
        runs: list[list[int]] = [[0]]
        for i in (1, 2):
            if inputs[i] is inputs[i - 1]:
                runs[-1].append(i)
            else:
                runs.append([i])
        projected: list[Tensor | None] = []
        start = 0
        for run in runs:
            sizes = [self.sizes[i] for i in run]
            rows = slice(start, start := start + sum(sizes))
            tokens = inputs[run[0]]
            if tokens is None:
                projected += [None] * len(run)
            else:
                projected += run_linear(self.in_proj, tokens, rows).split(sizes, dim=-1)
        return projected

    def _split(self, projected: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of what the fused matrix made."""
        return projected.split(self.sizes, dim=-1)
