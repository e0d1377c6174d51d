"""The inputs of one attention, which every kernel is given, and the checks of `attend`'s arguments
against each other that they have passed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from attnkit.core.arguments import as_number, floating, not_nested, tensors_only
from attnkit.core.masks.base import Mask, as_4d, as_mask, check_broadcastable
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.masks.kept import kept_mask
from attnkit.core.masks.sequences import Causal, Padding
from attnkit.core.normalizers import Normalizer, Softmax, as_normalizer
from attnkit.core.operators.precision import WITHOUT_AUTOCAST, cast_bias, wide
from attnkit.core.scores.kinds import ScaledDot, Score, as_score


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
    sink: Tensor | None = None,
) -> Inputs:
    """Check `attend`'s arguments against each other and return them as `Inputs`.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    tensors_only(query=query, key=key, value=value)
    dropout_p = as_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: expected 0 <= dropout_p < 1, got {dropout_p}")
    if not isinstance(normalizer, Normalizer):
        normalizer = as_normalizer(normalizer)
    if scale is not None or not isinstance(score, Score):
        score = as_score(score, scale)
    not_nested(query=query, key=key, value=value, bias=bias)
    query, key, value = _autocast(query, key, value)
    _check_tensors(query, key, value)
    score.check(query, key)
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    if isinstance(bias, CausalBias):
        mask, bias = _with_causal(mask, bias, num_queries, num_keys), None
    if mask is not None:
        mask = as_mask(mask)
        mask.check(batch, num_heads, num_queries, num_keys)
    if bias is not None:
        tensors_only(bias=bias)
        _check_layout("bias", bias)
        floating("bias", bias, query)
        check_broadcastable("bias", bias, (batch, num_heads, num_queries, num_keys))
        # kernels without a gradient for the bias can compute it if no gradient is needed
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
        dropout_p=dropout_p,
        sink=None if sink is None else _sink(sink, query, normalizer),
    )
    if edge_features is not None:
        _check_edge_features(edge_features, inputs)
    normalizer.check(inputs)
    if isinstance(mask, Causal) and mask.align == "bottom_right" and num_queries == 1 < num_keys:
        return replace(inputs, mask=None)  # the last query sees everything
    return inputs


def _with_causal(
    mask: Mask | Tensor | None, bias: CausalBias, num_queries: int, num_keys: int
) -> Mask:
    """Return the mask combined with the causal mask that torch's `CausalBias` stands for."""
    if (bias.seq_len_q, bias.seq_len_kv) != (num_queries, num_keys):
        raise ValueError(
            f"bias: the CausalBias has {bias.seq_len_q} queries and {bias.seq_len_kv} keys, "
            f"expected {num_queries} and {num_keys}"
        )
    is_top_left = bias.variant == CausalVariant.UPPER_LEFT
    causal = Causal("top_left" if is_top_left else "bottom_right")
    return causal if mask is None else as_mask(mask) & causal


def _sink(sink: Tensor, query: Tensor, normalizer: Normalizer) -> Tensor:
    """Check the sink and return it as `Inputs` holds it."""
    floating("sink", sink, query)
    if list(sink.shape) != [query.shape[1]]:
        raise ValueError(f"sink: expected [heads] = [{query.shape[1]}], got {list(sink.shape)}")
    if not isinstance(normalizer, Softmax):
        raise ValueError(f"sink: expected softmax, to whose sums it is added, got {normalizer}")
    sink = sink if torch.is_grad_enabled() else sink.detach()
    dtype = wide(query.dtype)
    return sink.to(dtype).clamp(min=torch.finfo(dtype).min)


def _check_layout(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor, got the layout {tensor.layout}; "
            "a sparse pattern is a mask, attnkit.Edges"
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


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    # torch casts SDPA's inputs under autocast. Casting them here lets every kernel be chosen for
    # the precision in which it will run. Like torch, this leaves float64 alone.
    device_type = tensors[0].device.type
    if device_type in WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    is_plain = (
        query.ndim == key.ndim == value.ndim == 4
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.is_floating_point()
        and query.layout is key.layout is value.layout is torch.strided
    )
    for name, tensor in () if is_plain else (("query", query), ("key", key), ("value", value)):
        _check_layout(name, tensor)
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
    batch, num_heads, _, _ = query.shape
    *key_sizes, _ = key.shape
    *value_sizes, _ = value.shape
    if key_sizes != value_sizes:
        raise ValueError(
            f"value: expected the batch, heads and tokens of key {key_sizes}, got {value_sizes}"
        )
    key_batch, kv_heads, _ = key_sizes
    if key_batch != batch:
        raise ValueError(f"key: expected query's batch {batch}, got {key_batch}")
    if num_heads != kv_heads and (kv_heads == 0 or num_heads % kv_heads):
        raise ValueError(f"key: its {kv_heads} heads do not divide query's {num_heads} heads")
