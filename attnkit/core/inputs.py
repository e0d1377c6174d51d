"""The checked inputs of one attention, which every kernel is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import EdgeFeatures
from attnkit.core.masks.kept import kept_mask
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.normalizers import Normalizer
from attnkit.core.operators.precision import cast_bias, wide
from attnkit.core.scores.kinds import ScaledDot, Score


@dataclass(frozen=True, eq=False)
class Inputs:
    """The checked arguments of `attend`: shapes fit, names are resolved, the bias is 4-D."""

    query: Annotated[Tensor, "batch heads queries head_dim"]
    key: Annotated[Tensor, "batch kv_heads keys head_dim"]
    value: Annotated[Tensor, "batch kv_heads keys value_dim"]
    score: Score
    normalizer: Normalizer  # without a default, which torch 2.11 cannot compile
    mask: Mask | None = None
    bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None
    edge_features: EdgeFeatures | None = None
    dropout_p: float = 0.0
    sink: Annotated[Tensor, "heads"] | None = None
    """In float32 or float64; −∞ is replaced by the lowest finite number, so that a row that may
    look nowhere still has a finite score."""

    @property
    def dot_dim(self) -> int | None:
        """The head dimension of the score as a scaled dot product, before its softcap; None if the
        score is not a dot product."""
        return self.score.dot_dim(self.query.shape[3])

    @property
    def scale(self) -> float:
        """The factor on query·key; the score must be a `ScaledDot`."""
        assert isinstance(self.score, ScaledDot)
        return self.score.factor(self.query.shape[3])

    def as_scaled_dot(self) -> Inputs:
        """Return the attention with `ScaledDot` as its score, if the score is a dot product."""
        score = self.score
        is_lowered = isinstance(score, ScaledDot) and not isinstance(score.scale, Tensor)
        if is_lowered or self.dot_dim is None:
            return self
        query, key, scale = score.as_dot(self.query, self.key, self.real_keys())
        return replace(
            self, query=query, key=key, score=ScaledDot(scale=scale, softcap=score.softcap)
        )

    def sink_as_key(self) -> Inputs:
        """Return the same attention with the sink as one more key of zeros, whose bias is the sink
        and whose value is 0.

        The score must be a scaled dot product; mask and bias become one tensor of biases.
        """
        assert self.sink is not None
        bias = self.query.new_zeros(1, 1, 1, 1) if self.bias is None else self.bias
        term = replace(self, bias=bias).attn_mask()
        assert term is not None
        sink = cast_bias(self.sink, term.dtype)[None, :, None, None]
        rows = torch.broadcast_shapes(term.shape[:3], sink.shape[:3])
        term = torch.cat([term.expand(*rows, self.num_keys), sink.expand(*rows, 1)], dim=3)
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (self.key, self.value))
        return replace(self, key=key, value=value, mask=None, bias=term, sink=None)

    def real_keys(self) -> Annotated[Tensor, "batch 1 keys 1", bool] | None:
        """Return which keys are not padding; None if the mask has no `Padding`."""
        real = [
            part.dense(1, self.num_keys, self.key.device).transpose(2, 3)
            for part in self.masks
            if isinstance(part, Padding)
        ]
        return reduce(torch.Tensor.__and__, real) if real else None

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks whose intersection is the mask; empty without a mask."""
        return () if self.mask is None else self.mask.parts

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    @property
    def num_keys(self) -> int:
        return self.key.shape[2]

    @property
    def is_grouped(self) -> bool:
        """Whether several query heads share a key/value head (grouped-query attention)."""
        # a branch, because under torch.compile the comparison is a SymBool, which torch refuses
        return True if self.query.shape[1] != self.key.shape[1] else False  # noqa: SIM210

    @property
    def is_empty(self) -> bool:
        """Whether a tensor is empty; kernels treat this case differently."""
        return not (self.query.numel() and self.key.numel() and self.value.numel())

    @property
    def is_causal(self) -> bool:
        """Whether the mask is exactly j ≤ i, which kernels compute without a tensor."""
        # for sizes that a program does not know the answer is False
        return isinstance(self.mask, Causal) and statically_known_true(
            self.mask.offset(self.num_queries, self.num_keys) == 0
        )

    @property
    def has_attn_mask(self) -> bool:
        """Whether a kernel has to read a tensor of biases or booleans."""
        return self.bias is not None or not (self.mask is None or self.is_causal)

    def tensors(self) -> Iterator[object]:
        """Yield all fields of the inputs, the score, the normalizer and the edge features, among
        them every tensor that may have a derivative."""
        for owner in (self, self.score, self.normalizer, self.edge_features):
            if owner is not None:
                yield from vars(owner).values()

    def repeated_heads(self) -> tuple[Tensor, Tensor]:
        """Return key and value with as many heads as the query."""
        if not self.is_grouped:
            return self.key, self.value
        groups = self.query.shape[1] // self.key.shape[1]
        return self.key.repeat_interleave(groups, dim=1), self.value.repeat_interleave(
            groups, dim=1
        )

    def dense_mask(self) -> Tensor | None:
        """Return the mask as booleans broadcastable to [batch, heads, queries, keys]."""
        if self.mask is None:
            return None
        return self.mask.dense(self.num_queries, self.num_keys, self.query.device)

    def attn_mask(self) -> Tensor | None:
        """Return mask and bias as the one tensor that fused kernels read: booleans, or biases with
        −inf; None if they need none."""
        if not self.has_attn_mask:
            return None
        device, dtype = self.query.device, self.query.dtype
        sizes = self.num_queries, self.num_keys
        if self.bias is None:
            assert self.mask is not None
            # on the CPU torch would convert booleans to biases again in each layer
            return kept_mask(self.mask, *sizes, device, dtype if self.query.is_cpu else torch.bool)
        bias = cast_bias(self.bias, dtype)
        if self.mask is None:
            return bias
        return bias.masked_fill(~kept_mask(self.mask, *sizes, device, torch.bool), -torch.inf)


def in_high_precision(inputs: Inputs) -> Inputs:
    """Return the inputs in float32 (float64 if they are), in which the definition is computed."""
    dtype = wide(inputs.query.dtype)
    return replace(
        inputs,
        query=inputs.query.to(dtype),
        key=inputs.key.to(dtype),
        value=inputs.value.to(dtype),
        score=inputs.score.to(dtype),
        normalizer=inputs.normalizer.to(dtype),
        edge_features=None if inputs.edge_features is None else inputs.edge_features.to(dtype),
        bias=None if inputs.bias is None else inputs.bias.to(dtype),
    )
