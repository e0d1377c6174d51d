"""Comparison of a model's attention with the definition, at the shapes of the model."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.checks.report import Fault, Row
from attnkit.checks.subject import difference
from attnkit.core.attend import attend
from attnkit.core.capture.calls import AttentionCall, EdgeCall
from attnkit.core.capture.watch import watch_attention
from attnkit.core.inputs import Inputs
from attnkit.core.kernels.reference import reference_attention
from attnkit.core.running import evaluating


def examine_model(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Row], list[Fault]]:
    """Return a row for each attention in `model(*inputs)`, in evaluation mode, and the faults.

    Its output and the gradients of its function are compared with the definition in float64.

    Raises:
        ValueError: the model is no module, raises, or ran no visible attention
            (`attnkit.core.capture`).
    """
    rows, faults = [], []
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    with evaluating(model), watch_attention(model) as calls:
        try:
            model(*inputs)
        except Exception as error:
            raise ValueError(
                f"model: {type(model).__name__} raises {type(error).__name__} for these inputs: "
                f"{str(error).splitlines()[0]}"
            ) from error
    for call in calls:
        if isinstance(call, AttentionCall):
            like, found = call.query, _differences(call)
            said = " × ".join(map(str, like.shape))
            said += f", {type(call.inputs.mask).__name__}" if call.inputs.mask is not None else ""
        else:
            like, found = call.weights, _of_edges(call)
            said = f"{call.num_nodes[1]} nodes, {len(like)} edges, {call.num_heads} heads"
        dtype, device = str(like.dtype).removeprefix("torch."), str(like.device)
        name = f"{call.layer or 'the model'} ({call.tap}), {said}"
        limit = torch.finfo(like.dtype).eps ** 0.75
        cells = {}
        for what, (worst, which) in found.items():
            cells[what] = f"{worst:.0e}" if worst <= limit else "WRONG"
            if not worst <= limit:
                seen = f"{which} differs by {worst:.1e} of the largest value"
                faults.append(Fault(f"{name}, {dtype} on {device}", what, "fail", seen))
        rows.append(Row(name, device, dtype, 1, cells))
    return rows, faults


def _differences(call: AttentionCall) -> dict[str, tuple[float, str]]:
    if call.inputs.dropout_p or call.inputs.normalizer.draws:
        return {}  # random outputs cannot be compared with the definition
    inputs = call.inputs
    exact = [_leaf(tensor.double()) for tensor in (call.query, call.key, call.value)]
    bias = None if inputs.bias is None else inputs.bias.detach().double()
    definition = reference_attention(_with(replace(inputs, bias=bias), exact))
    found = {"output": (difference(call.output.detach(), definition.detach()), "the output")}
    # computed again, since the model may pass on another tensor than its kernel's output
    leaves = [_leaf(tensor.clone()) for tensor in (call.query, call.key, call.value)]
    output = _computed(call.tap, _with(inputs, leaves))
    if output.requires_grad:
        towards = torch.randn(output.shape, dtype=torch.float64, device=output.device)
        got = torch.autograd.grad(output, leaves, towards.to(output))
        right = torch.autograd.grad(definition, exact, towards)
        largest = max(tensor.abs().max().item() for tensor in right) or 1.0
        errors = {
            name: ((was.double() - should).abs().max() / largest).nan_to_num(inf).item()
            for name, was, should in zip(("query", "key", "value"), got, right, strict=True)
        }
        worst = max(errors, key=errors.__getitem__)
        found["gradients"] = errors[worst], f"the gradient of {worst}"
    return found


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _with(inputs: Inputs, tensors: list[Tensor]) -> Inputs:
    query, key, value = tensors
    return replace(inputs, query=query, key=key, value=value)


def _of_edges(call: EdgeCall) -> dict[str, tuple[float, str]]:
    """Compare the output of a layer whose values are known; for others check that the weights of a
    node's edges sum to 1."""
    source, target = call.edge_index
    weights = call.weights.double()
    sums = weights.new_zeros(call.num_nodes[1], call.num_heads).index_add(0, target, weights)
    if call.value is None:
        found = sums[target], torch.ones_like(weights), "the sum of a node's weights"
    elif call.edge_features is None:
        sent = weights.T[:, :, None] * call.value.double()[:, source]
        expected = sent.new_zeros(call.seen_in.shape[1:]).index_add(1, target, sent)
        found = call.seen_in[0], expected, "the output"
    else:
        return {}
    actual, right, which = found
    return {"output": (difference(actual.detach(), right.detach()), which)}


def _computed(tap: str, inputs: Inputs) -> Tensor:
    """Return the output of the function that the model calls."""
    tensors = inputs.query, inputs.key, inputs.value
    if tap == "attend":
        names = ("score", "mask", "bias", "normalizer", "edge_features", "sink")
        return attend(*tensors, **{name: getattr(inputs, name) for name in names})
    mask = inputs.attn_mask()
    return F.scaled_dot_product_attention(
        *tensors,
        attn_mask=mask,
        is_causal=mask is None and inputs.is_causal,
        scale=inputs.scale,
        enable_gqa=inputs.is_grouped,
    )
