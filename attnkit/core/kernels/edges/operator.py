"""Attention over edges as operators of torch, into which torch.compile need not look.

The kernel reads the edges to decide how it computes, which torch.compile cannot trace.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.core.kernels.edges.lanes import NAMES, Plan
from attnkit.core.kernels.edges.softmax import backward, forward
from attnkit.core.masks.adjacency import Adjacency

_GRAPH = (
    "Tensor offsets, Tensor target, Tensor source, SymInt num_sources, "
    "Tensor? by_source, Tensor? source_offsets"
)
_PLAN = "float scale, float? negative_slope, bool sums_features, float dropout_p, Tensor? seed"
_NEEDED = ("query", "key", "value")
_TENSORS = ", ".join(f"Tensor{'' if name in _NEEDED else '?'} {name}" for name in NAMES)
_RESULTS = "Tensor output, Tensor sums, Tensor weights, Tensor totals"
_GRADIENTS = "Tensor? gradient, Tensor? sums_gradient, bool[] wanted"
_NUM_PLAN, _NUM_RESULTS = 11, 4


def traced_softmax(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `EdgeSoftmax.apply` gives, as one operator."""
    graph = plan.adjacency
    output, sums, _, _ = edge_softmax(
        graph.offsets,
        graph.target,
        graph.source,
        graph.num_sources,
        graph.known("by_source"),
        graph.known("source_offsets"),
        plan.scale,
        plan.negative_slope,
        plan.sums_features,
        plan.dropout_p,
        plan.seed,
        *tensors,
    )
    return output, sums


def _read(arguments: Sequence[Any]) -> tuple[Plan, list[Tensor | None]]:
    """The plan and the tensors, of the operators' first arguments."""
    offsets, target, source, num_sources, by_source, source_offsets, *plan = arguments[:_NUM_PLAN]
    graph = Adjacency(offsets, target, source, None, num_sources)
    for name, tensor in (("by_source", by_source), ("source_offsets", source_offsets)):
        if tensor is not None:
            vars(graph)[name] = tensor
    return Plan(graph, *plan), [*arguments[_NUM_PLAN : _NUM_PLAN + len(NAMES)]]


@torch.library.custom_op(
    "attnkit::edge_softmax",
    mutates_args=(),
    schema=f"({_GRAPH}, {_PLAN}, {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def edge_softmax(*arguments):
    """`softmax.forward`."""
    return forward(*_read(arguments))


@torch.library.custom_op(
    "attnkit::edge_softmax_backward",
    mutates_args=(),
    schema=f"({_GRAPH}, {_PLAN}, {_TENSORS}, {_RESULTS}, {_GRADIENTS}) -> Tensor[]",
)
def _backward(*arguments):
    """`softmax.backward`: a tensor for each name, empty where it is not wanted."""
    *results, gradient, sums_gradient, wanted = arguments[_NUM_PLAN + len(NAMES) :]
    names = {name for name, is_wanted in zip(NAMES, wanted, strict=True) if is_wanted}
    found = backward(*_read(arguments), tuple(results), (gradient, sums_gradient), names)
    return [
        found[name].contiguous() if name in names else results[0].new_empty(0) for name in NAMES
    ]


@edge_softmax.register_fake
def _(*arguments):
    _, target, *_ = arguments
    _, _, sums_features, *_ = arguments[6:_NUM_PLAN]
    query, _, value, *_, features, _ = arguments[_NUM_PLAN:]
    lanes, targets, _ = query.shape
    edge_dim = features.shape[1] if sums_features else 0
    return (
        value.new_empty(lanes, targets, value.shape[2]),
        value.new_empty(lanes, targets, edge_dim),
        value.new_empty(lanes, target.shape[0]),
        value.new_empty(lanes, targets, 1),
    )


@_backward.register_fake
def _(*arguments):
    tensors, wanted = arguments[_NUM_PLAN : _NUM_PLAN + len(NAMES)], arguments[-1]
    return [
        tensors[0].new_empty(tensor.shape if is_wanted else 0)
        for tensor, is_wanted in zip(tensors, wanted, strict=True)
    ]


def _setup_context(ctx, inputs, output):
    ctx.numbers = [None if isinstance(given, Tensor) else given for given in inputs]
    ctx.save_for_backward(
        *(given if isinstance(given, Tensor) else None for given in inputs), *output
    )
    ctx.set_materialize_grads(False)


def _derivative(ctx, gradient, sums_gradient, *_):
    *tensors, output, sums, weights, totals = ctx.saved_tensors
    inputs = [n if t is None else t for n, t in zip(ctx.numbers, tensors, strict=True)]
    wanted = [bool(needed) for needed in ctx.needs_input_grad[_NUM_PLAN:]]
    results = output, sums, weights, totals
    found = _backward(*inputs, *results, gradient, sums_gradient, wanted)
    by_name = (part if is_wanted else None for part, is_wanted in zip(found, wanted, strict=True))
    return *(None,) * _NUM_PLAN, *by_name


edge_softmax.register_autograd(_derivative, setup_context=_setup_context)
