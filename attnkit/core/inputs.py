"""The checked inputs of one attention: what every kernel is given and decides upon."""

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
    """The checked arguments of `attend`: shapes agree, names are resolved.

    The bias has four dimensions.
    """

    query: Annotated[Tensor, "batch heads queries head_dim"]
    key: Annotated[Tensor, "batch kv_heads keys head_dim"]
    value: Annotated[Tensor, "batch kv_heads keys value_dim"]
    score: Score
    normalizer: Normalizer  # no default: torch 2.11 cannot compile one
    mask: Mask | None = None
    bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None
    edge_features: EdgeFeatures | None = None
    dropout_p: float = 0.0
    sink: Annotated[Tensor, "heads"] | None = None
    """In the dtype that sums are computed in, nowhere −∞: a row that may look nowhere has it."""

    @property
    def dot_dim(self) -> int | None:
        """The head dimension of the scaled dot product that the score is, before its softcap if it
        has one; None if it is none."""
        return self.score.dot_dim(self.query.shape[3])

    @property
    def scale(self) -> float:
        """The factor on query·key, of a score that is a scaled dot product as it stands."""
        assert isinstance(self.score, ScaledDot)
        return self.score.factor(self.query.shape[3])

    def as_scaled_dot(self) -> Inputs:
        """The same attention with a scaled dot product for its score, if it is one."""
        score = self.score
        is_lowered = isinstance(score, ScaledDot) and not isinstance(score.scale, Tensor)
        if is_lowered or self.dot_dim is None:
            return self
        query, key, scale = score.as_dot(self.query, self.key, self.real_keys())
        return replace(
            self, query=query, key=key, score=ScaledDot(scale=scale, softcap=score.softcap)
        )

    def sink_as_key(self) -> Inputs:
        """The same attention by one more key of zeros: the sink is its bias, and its value is 0.

        The score is a scaled dot product; mask and bias become one tensor of biases.
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
        """Which keys are not padding; None where no `Padding` says so."""
        real = [
            part.dense(1, self.num_keys, self.key.device).transpose(2, 3)
            for part in self.masks
            if isinstance(part, Padding)
        ]
        return reduce(torch.Tensor.__and__, real) if real else None

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The masks whose intersection the mask is; none where there is no mask."""
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
        # a branch, since torch.compile makes a SymBool of heads that it traces, which torch refuses
        return True if self.query.shape[1] != self.key.shape[1] else False  # noqa: SIM210

    @property
    def is_empty(self) -> bool:
        """Whether a size is zero, where kernels differ and there is nothing to compute."""
        return not (self.query.numel() and self.key.numel() and self.value.numel())

    @property
    def is_causal(self) -> bool:
        """Whether the mask is what kernels call causal: j ≤ i and nothing else."""
        # of sizes that a program does not know, it may be and need not
        return isinstance(self.mask, Causal) and statically_known_true(
            self.mask.offset(self.num_queries, self.num_keys) == 0
        )

    @property
    def has_attn_mask(self) -> bool:
        """Whether a kernel has to read a tensor of biases or of permissions."""
        return self.bias is not None or not (self.mask is None or self.is_causal)

    def tensors(self) -> Iterator[object]:
        """All that a derivative may be asked of, and what else stands beside it."""
        for owner in (self, self.score, self.normalizer, self.edge_features):
            if owner is not None:
                yield from vars(owner).values()

    def repeated_heads(self) -> tuple[Tensor, Tensor]:
        """Key and value with as many heads as the query."""
        if not self.is_grouped:
            return self.key, self.value
        groups = self.query.shape[1] // self.key.shape[1]
        return self.key.repeat_interleave(groups, dim=1), self.value.repeat_interleave(
            groups, dim=1
        )

    def dense_mask(self) -> Tensor | None:
        """The mask as booleans broadcastable to [batch, heads, queries, keys]."""
        if self.mask is None:
            return None
        return self.mask.dense(self.num_queries, self.num_keys, self.query.device)

    def attn_mask(self) -> Tensor | None:
        """Mask and bias as the one tensor fused kernels read: booleans, or biases with −inf."""
        if not self.has_attn_mask:
            return None
        device, dtype = self.query.device, self.query.dtype
        sizes = self.num_queries, self.num_keys
        if self.bias is None:
            assert self.mask is not None
            # on the CPU torch would make biases of booleans, for each layer its own
            return kept_mask(self.mask, *sizes, device, dtype if self.query.is_cpu else torch.bool)
        bias = cast_bias(self.bias, dtype)
        if self.mask is None:
            return bias
        return bias.masked_fill(~kept_mask(self.mask, *sizes, device, torch.bool), -torch.inf)


def in_high_precision(inputs: Inputs) -> Inputs:
    """The same inputs in float32, or float64 if they are; how the definition is computed."""
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
