"""The checked inputs of one attention: what every kernel is given and decides upon."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from attnkit.core.autocast import autocast_dtype
from attnkit.core.graph import EdgeFeatures, Edges
from attnkit.core.masks import Causal, Mask, Padding, as_4d, as_mask, check_broadcastable, parts
from attnkit.core.normalizers import Normalizer, Softmax, as_normalizer
from attnkit.core.scores import ScaledDot, Score, as_score

__all__ = ["Inputs", "cast_bias", "check_inputs"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What `attend` was asked for, checked: shapes agree, names are resolved.

    query [batch, heads, queries, head_dim], key [batch, kv_heads, keys, head_dim],
    value [batch, kv_heads, keys, value_dim]; bias is None or four-dimensional.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score: Score
    normalizer: Normalizer  # no default: torch 2.11 cannot compile one
    mask: Mask | None = None
    bias: Tensor | None = None
    edge_features: EdgeFeatures | None = None
    dropout_p: float = 0.0

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

    def lowered(self) -> Inputs:
        """The same attention with a scaled dot product for its score, if it is one."""
        if isinstance(self.score, ScaledDot) or self.dot_dim is None:
            return self
        query, key, scale = self.score.as_dot(self.query, self._key_where_padding_is_the_mean())
        return replace(
            self, query=query, key=key, score=ScaledDot(scale=scale, softcap=self.score.softcap)
        )

    def _key_where_padding_is_the_mean(self) -> Tensor:
        """The key, with the mean of an item's other keys where `Padding` hides it.

        Nobody sees these keys, but a score may compute with all of them: the Gaussian's centre,
        drawn to padding that lies far off, would cost the rest their digits.
        """
        real = [
            part.dense(self.num_queries, self.num_keys, self.key.device).transpose(2, 3)
            for part in parts(self.mask)
            if isinstance(part, Padding)
        ]
        if not real:
            return self.key
        is_real = reduce(torch.Tensor.__and__, real)
        kept = self.key.detach().masked_fill(~is_real, 0.0)
        count = is_real.sum(dim=2, keepdim=True).clamp(min=1)
        dtype = torch.promote_types(kept.dtype, torch.float32)
        mean = kept.sum(dim=2, keepdim=True, dtype=dtype) / count
        return torch.where(is_real, self.key, mean.to(self.key.dtype))

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    @property
    def num_keys(self) -> int:
        return self.key.shape[2]

    @property
    def is_grouped(self) -> bool:
        """Whether several query heads share a key/value head (grouped-query attention)."""
        return self.query.shape[1] != self.key.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether a size is zero, where kernels differ and there is nothing to compute."""
        return 0 in (*self.query.shape, *self.key.shape, *self.value.shape)

    @property
    def is_causal(self) -> bool:
        """Whether the mask is what kernels call causal: j ≤ i and nothing else."""
        return (
            isinstance(self.mask, Causal) and self.mask.offset(self.num_queries, self.num_keys) == 0
        )

    @property
    def has_term(self) -> bool:
        """Whether a kernel has to read a tensor of biases or of permissions."""
        return self.bias is not None or not (self.mask is None or self.is_causal)

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

    def term(self) -> Tensor | None:
        """Mask and bias as the one tensor fused kernels read: booleans, or biases with −inf."""
        if not self.has_term:
            return None
        allowed = self.dense_mask()
        if self.bias is None:
            return allowed
        bias = cast_bias(self.bias, self.query.dtype)
        return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: str | Score = "scaled_dot",
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    normalizer: str | Normalizer = "softmax",
    edge_features: EdgeFeatures | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Inputs:
    """Check `attend`'s arguments against each other; ValueError or TypeError name the wrong one."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected 0 <= dropout_p < 1, got {dropout_p}")
    normalizer = as_normalizer(normalizer)
    score = as_score(score, scale)
    query, key, value = _autocast(query, key, value)
    _check_tensors(query, key, value)
    score.check(query, key)
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    if mask is not None:
        mask = as_mask(mask)
        mask.check(batch, num_heads, num_queries, num_keys)
    if bias is not None:
        if not bias.is_floating_point():
            raise TypeError(f"bias: expected a floating-point tensor, got {bias.dtype}")
        if bias.device != query.device:
            raise ValueError(f"bias: is on {bias.device}, but query is on {query.device}")
        check_broadcastable("bias", bias, (batch, num_heads, num_queries, num_keys))
        # kernels without a gradient for the bias can serve it where none is asked
        bias = as_4d(bias if torch.is_grad_enabled() else bias.detach())
    inputs = Inputs(
        query,
        key,
        value,
        score=score,
        mask=mask,
        bias=bias,
        normalizer=normalizer,
        edge_features=edge_features,
        dropout_p=float(dropout_p),
    )
    if edge_features is not None:
        _check_edge_features(edge_features, inputs)
    normalizer.check(inputs)
    if isinstance(mask, Causal) and mask.align == "bottom_right" and num_queries == 1 < num_keys:
        return replace(inputs, mask=None)  # the last query sees everything
    return inputs


def in_high_precision(inputs: Inputs) -> Inputs:
    """The same inputs in float32, or float64 if they are; how the definition is computed."""
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
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


def _check_edge_features(features: EdgeFeatures, inputs: Inputs) -> None:
    if not isinstance(features, EdgeFeatures):
        raise TypeError(
            f"edge_features: expected attnkit.EdgeFeatures, got {type(features).__name__}"
        )
    if not isinstance(inputs.mask, Edges):
        given = None if inputs.mask is None else type(inputs.mask).__name__
        raise ValueError(f"edge_features: expected Edges alone as the mask, got {given}")
    if not isinstance(inputs.normalizer, Softmax):
        raise ValueError(f"edge_features: expected softmax, got {inputs.normalizer}")
    dims = inputs.key.shape[3], inputs.value.shape[3]
    features.check(inputs.mask, inputs.query.shape[1], *dims)


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in another dtype, where finite stays finite: a −1e9 must not forbid in float16."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    # torch casts SDPA's inputs under autocast; doing it first lets every kernel, ours included,
    # be chosen for the precision that will run. Like torch, leave float64 alone.
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: expected [batch, heads, tokens, head_dim], got {list(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name}: is {tensor.dtype} on {tensor.device}, "
                f"but query is {query.dtype} on {query.device}"
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "value: expected the batch, heads and tokens of key "
            f"{list(key.shape[:3])}, got {list(value.shape[:3])}"
        )
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key: expected query's batch {query.shape[0]}, got {key.shape[0]}")
    if query.shape[1] != key.shape[1] and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
        raise ValueError(
            f"key: its {key.shape[1]} heads do not divide query's {query.shape[1]} heads"
        )
