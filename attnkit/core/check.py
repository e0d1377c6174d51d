"""Checks of `attend`'s arguments against each other."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attnkit.core.arguments import as_number, floating, not_nested, tensors_only
from attnkit.core.inputs import Inputs
from attnkit.core.masks.base import Mask, as_4d, as_mask, check_broadcastable
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.masks.sequences import Causal
from attnkit.core.normalizers import Normalizer, Softmax, as_normalizer
from attnkit.core.operators.precision import WITHOUT_AUTOCAST, wide
from attnkit.core.scores.kinds import Score, as_score


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
