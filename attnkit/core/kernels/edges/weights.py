"""Attention weights of the edges of a graph, in memory of edges × heads."""

from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from attnkit.core.inputs import check_inputs, in_high_precision
from attnkit.core.kernels.edges.edges import EdgesKernel
from attnkit.core.kernels.edges.problem import EdgeProblem, Gradients, Results, solve
from attnkit.core.kernels.edges.scores import groups, new_gradients, sum_weights
from attnkit.core.kernels.reference import softmax_of_edges
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.kinds import Score


def edge_weights(
    query: Annotated[Tensor, "*batch heads targets head_dim"],
    key: Annotated[Tensor, "*batch kv_heads sources head_dim"],
    edges: Edges,
    *,
    score: str | Score = "scaled_dot",
    edge_features: EdgeFeatures | None = None,
    scale: float | None = None,
    sink: Annotated[Tensor, "heads"] | None = None,
) -> Annotated[Tensor, "*batch heads edges"]:
    """Compute the weights with which `attend(…, mask=edges)` averages the values, before dropout.

        weight_e = softmax over the edges e of a target i of score(query_i, key_j + W_k e_ij) + b_ij

    The weights of the edges into one target sum to 1, or to less with a sink; an edge given twice
    has two weights. They are computed in float32 (float64 if the inputs are) and are
    differentiable. No tensor of edges × channels is made, unless the kernel "edges" cannot compute
    the score; then the score is computed by its definition.

    Args:
        query, key: both may lack the batch; kv_heads divides heads.
        edges: the graph.
        score, scale, sink: as in `attnkit.attend`.
        edge_features: the features that edges add to scores and keys; those added to values do not
            change the weights.

    Returns:
        The weights, in the dtype of the inputs and in the order of `edges.edge_index`.

    Raises:
        ValueError, TypeError: as `attnkit.attend`.
    """
    if not isinstance(edges, Edges):
        raise TypeError(f"edges: expected attnkit.Edges, got {type(edges).__name__}")
    if query.ndim == key.ndim == 3:
        options: dict[str, Any] = {"score": score, "edge_features": edge_features}
        return edge_weights(query[None], key[None], edges, **options, scale=scale, sink=sink)[0]
    if isinstance(edge_features, EdgeFeatures):
        edge_features = replace(edge_features, value_weight=None)
    inputs = check_inputs(
        query,
        key,
        key,
        score=score,
        mask=edges,
        edge_features=edge_features,
        scale=scale,
        sink=sink,
    )
    with no_autocast(query):
        exact = in_high_precision(inputs)
        if torch.compiler.is_compiling() or next(EdgesKernel().reasons(inputs), None):
            all_keys, _ = exact.repeated_heads()
            weights = softmax_of_edges(replace(exact, key=all_keys), edges)
        else:
            problem = EdgeProblem.of(exact)
            (weights,) = solve(_Weights(), problem)
            order = problem.adjacency.order
            if order is not None:
                weights = torch.empty_like(weights).index_copy(1, order.long(), weights)
            weights = weights.unflatten(0, inputs.query.shape[:2])
    return weights.to(inputs.query.dtype)


class _Weights:
    """Solver that computes the weights of a problem, [lanes, edges]."""

    name = "edges"

    def forward(self, problem: EdgeProblem) -> tuple[Results, Results]:
        weights = problem.query.new_empty(len(problem.query), problem.adjacency.num_edges)
        for group in groups(problem):
            exponentials = weights[group.lanes].view(-1)
            totals = group.exponentials(exponentials).squeeze(1)
            exponentials.div_(totals.index_select(0, group.graph.target))
        return (weights,), ()

    def backward(
        self, problem: EdgeProblem, results: Results, gradients: Gradients, wanted: set[str]
    ) -> dict[str, Tensor]:
        (weights,), (gradient,) = results, gradients
        assert gradient is not None
        found = new_gradients(problem, wanted - {"value"})
        for group in groups(problem):
            # d score_e = weight_e (g_e − Σ weight g over the edges of its target)
            used = weights[group.lanes].view(-1)
            slopes = gradient[group.lanes].reshape(-1) * used
            shift = sum_weights(group.graph, slopes).squeeze(1)
            slopes -= shift.index_select(0, group.graph.target) * used
            parts = {}
            if "sink" in wanted:  # the sink has the weight that is left by the edges
                left = 1 - sum_weights(group.graph, used).flatten()
                num_lanes = group.lanes.stop - group.lanes.start
                parts["sink"] = -(left * shift).view(num_lanes, -1).sum(dim=1)
            group.add_gradients(found, slopes, parts)
        return found
