"""Attention over the edges of a graph as one object, which all kernels for edges are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import refuse_second_derivative
from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.masks.edges import Edges
from attnkit.core.scores.additive import Additive

TENSORS = ("query", "key", "value", "vector", "edge_query", "edge_key", "features", "bias", "sink")
"""The fields of `EdgeProblem` that have gradients."""


@dataclass(frozen=True, eq=False)
class EdgeProblem:
    """Attention over edges: the softmax over the edges of each target, of the scores

        scale · (query_i · key_j + edge_query_i · e)    or, if there is a vector,
        vectorᵀ activation(query_i + key_j + edge_key e)

    plus the bias, and with these weights the sum of the values, and of the features e.

    A lane is a head of a batch item. All edges are in the order of their targets.

    adjacency: the sorted edges.
    negative_slope: the slope of LeakyReLU, the activation; None: the activation is tanh.
    sums_features: whether the features are summed, too.
    seed: one integer for dropout; None: no dropout.
    query, key, value: [lanes, nodes, channels].
    vector, bias: [lanes, channels] and [lanes, edges].
    edge_query: [lanes, targets, edge_dim]; edge_key: [lanes, channels, edge_dim].
    features: [edges, edge_dim], the same for all lanes.
    sink: [lanes, 1, 1]; e^sink is added to the sum of each softmax.
    """

    adjacency: Adjacency
    scale: float
    negative_slope: float | None
    sums_features: bool
    dropout_p: float
    seed: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    vector: Tensor | None = None
    edge_query: Tensor | None = None
    edge_key: Tensor | None = None
    features: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs) -> EdgeProblem:
        """Make the problem of an attention with the mask `Edges`, in the inputs' precision."""
        assert isinstance(inputs.mask, Edges)
        batch, num_heads = inputs.query.shape[:2]
        adjacency, score, carried = inputs.mask.adjacency, inputs.score, inputs.edge_features
        key, value = inputs.repeated_heads()
        vector = edge_query = edge_key = features = key_weight = bias = slope = None
        query, scale, sink = inputs.query, 1.0, inputs.sink
        if sink is not None:
            sink = sink.expand(batch, -1).reshape(-1, 1, 1)
        if carried is not None:
            features, key_weight, bias = carried.features, carried.key_weight, carried.bias
            if adjacency.order is not None:
                features = None if features is None else features.index_select(0, adjacency.order)
                bias = None if bias is None else bias.index_select(1, adjacency.order)
            if bias is not None:
                bias = bias.expand(batch, num_heads, -1).flatten(0, 1)
        if isinstance(score, Additive):
            slope = score.negative_slope
            vector = score.vector.expand(batch, num_heads, -1).flatten(0, 1)
            if key_weight is not None:
                edge_key = key_weight.expand(batch, -1, -1, -1).flatten(0, 1)
        else:
            lowered = replace(inputs, key=key, value=value).as_scaled_dot()
            query, key, scale = lowered.query, lowered.key, lowered.scale
            if key_weight is not None:
                edge_query = (query @ key_weight).flatten(0, 1)
        return cls(
            adjacency,
            scale=scale,
            negative_slope=slope,
            sums_features=carried is not None and carried.value_weight is not None,
            dropout_p=inputs.dropout_p,
            seed=torch.randint(2**62, ()) if inputs.dropout_p else None,
            query=query.flatten(0, 1),
            key=key.flatten(0, 1),
            value=value.flatten(0, 1),
            vector=vector,
            edge_query=edge_query,
            edge_key=edge_key,
            features=features,
            bias=bias,
            sink=sink,
        )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields named by `TENSORS`."""
        return tuple(getattr(self, name) for name in TENSORS)

    @property
    def summed_dim(self) -> int:
        """The number of features of an edge that are summed."""
        return self.features.shape[1] if self.sums_features and self.features is not None else 0

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> EdgeProblem:
        """Return the same problem with other tensors."""
        other = object.__new__(EdgeProblem)  # takes a fifth of the time of `replace`
        vars(other).update(vars(self))
        vars(other).update(zip(TENSORS, tensors, strict=True))
        return other

    def flat(self) -> tuple[Any, ...]:
        """Return the problem as the arguments of an operator of torch, in the order of `SCHEMA`."""
        graph = self.adjacency
        return (
            *(graph.offsets, graph.target, graph.source, graph.num_sources),
            *(graph.known("by_source"), graph.known("source_offsets")),
            *(self.scale, self.negative_slope, self.sums_features, self.dropout_p, self.seed),
            *self.tensors,
        )

    @classmethod
    def of_flat(
        cls,
        offsets: Tensor,
        target: Tensor,
        source: Tensor,
        num_sources: int,
        by_source: Tensor | None,
        source_offsets: Tensor | None,
        *fields: Any,
    ) -> EdgeProblem:
        """Make the problem from the arguments that `flat` returned."""
        graph = Adjacency(offsets, target, source, None, num_sources)
        for name, tensor in (("by_source", by_source), ("source_offsets", source_offsets)):
            if tensor is not None:
                vars(graph)[name] = tensor
        return cls(graph, *fields)


SCHEMA = (
    "Tensor offsets, Tensor target, Tensor source, SymInt num_sources, "
    "Tensor? by_source, Tensor? source_offsets, "
    "float scale, float? negative_slope, bool sums_features, float dropout_p, Tensor? seed, "
    "Tensor query, Tensor key, Tensor value, Tensor? vector, "
    "Tensor? edge_query, Tensor? edge_key, Tensor? features, Tensor? bias, "
    "Tensor? sink"
)
NUM_FLAT = SCHEMA.count(",") + 1

Results = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


class Solver(Protocol):
    """A kernel that computes a problem."""

    name: str

    def forward(self, problem: EdgeProblem) -> tuple[Results, Results]:
        """Compute the outputs, and the further tensors that `backward` reads."""
        ...

    def backward(
        self, problem: EdgeProblem, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        """Compute the gradients of the wanted tensors, by name, from all results and the gradients
        of the outputs, at least one of which is not None; None stands for 0."""
        ...


def solve(solver: Solver, problem: EdgeProblem) -> Results:
    """Compute the outputs, which autograd can differentiate."""
    return _Solution.apply(solver, problem, *problem.tensors)


class _Solution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, solver: Solver, problem: EdgeProblem, *tensors: Tensor | None):
        outputs, kept = solver.forward(problem)
        # only torch keeps the tensors, which it frees after the backward
        ctx.solver, ctx.problem = solver, problem.with_tensors([None] * len(TENSORS))
        ctx.save_for_backward(*tensors, *outputs, *kept)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        if all(gradient is None for gradient in gradients):
            return (None,) * (2 + len(TENSORS))
        saved = ctx.saved_tensors  # read once: checkpoints do not give it a second time
        refuse_second_derivative(ctx.solver.name, *gradients, *saved)
        tensors, results = saved[: len(TENSORS)], saved[len(TENSORS) :]
        needed = zip(TENSORS, ctx.needs_input_grad[2:], strict=True)
        wanted = {name for name, is_needed in needed if is_needed}
        problem = ctx.problem.with_tensors(tensors)
        found = ctx.solver.backward(problem, results, gradients, wanted)
        return None, None, *(found.get(name) for name in TENSORS)
