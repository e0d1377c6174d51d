"""Attention weights of the edges of a graph, in memory of edges and heads."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.check import check_inputs
from attnkit.core.inputs import in_high_precision
from attnkit.core.kernels.base import refuse_second_derivative
from attnkit.core.kernels.edges.edges import EdgesKernel
from attnkit.core.kernels.edges.lanes import (
    NAMES,
    Plan,
    Workspace,
    as_lanes,
    exponentiate,
    make_scorer,
    write_scores,
)
from attnkit.core.kernels.edges.scores import sum_weights
from attnkit.core.kernels.reference import softmax_of_edges
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.precision import no_autocast
from attnkit.core.scores.kinds import Score


def edge_weights(
    query: Annotated[Tensor, "*batch heads targets head_dim"],
    key: Annotated[Tensor, "*batch kv_heads sources head_dim"],
    edges: Edges,
    *,
    score: str | Score = "scaled_dot",
    edge_features: EdgeFeatures | None = None,
    scale: float | None = None,
) -> Annotated[Tensor, "*batch heads edges"]:
    """The weights with which `attend(…, mask=edges)` averages the values, before dropout.

        weight_e = softmax over the edges e of a target i of score(query_i, key_j + W_k e_ij) + b_ij

    Those of the edges into one target sum to 1; an edge given twice has a weight for each time.
    Computed in float32 (float64 if the inputs are) and differentiable. No tensor of edges ×
    channels is made, unless the kernel "edges" cannot compute the score; then the score is computed
    by its definition.

    Args:
        query, key: both may lack the batch; kv_heads divides heads.
        edges: the graph.
        score, scale: as in `attnkit.attend`.
        edge_features: what edges add to scores and keys; what they add to the values changes no
            weight.

    Returns:
        The weights, in the dtype of the inputs, the edges in the order of `edges.edge_index`.

    Raises:
        ValueError, TypeError: as `attnkit.attend`.
    """
    if not isinstance(edges, Edges):
        raise TypeError(f"edges: expected attnkit.Edges, got {type(edges).__name__}")
    if query.ndim == key.ndim == 3:
        options = {"score": score, "edge_features": edge_features, "scale": scale}
        return edge_weights(query[None], key[None], edges, **options)[0]  # type: ignore[arg-type]
    if isinstance(edge_features, EdgeFeatures):
        edge_features = replace(edge_features, value_weight=None)
    inputs = check_inputs(
        query, key, key, score=score, mask=edges, edge_features=edge_features, scale=scale
    )
    with no_autocast(query):
        exact = in_high_precision(inputs)
        if torch.compiler.is_compiling() or next(EdgesKernel().reasons(inputs), None):
            all_keys, _ = exact.repeated_heads()
            weights = softmax_of_edges(replace(exact, key=all_keys), edges)
        else:
            plan, tensors = as_lanes(exact)
            weights = _EdgeWeights.apply(plan, *tensors)
            order = plan.adjacency.order
            if order is not None:
                weights = torch.empty_like(weights).index_copy(1, order.long(), weights)
            weights = weights.unflatten(0, inputs.query.shape[:2])
    return weights.to(inputs.query.dtype)


class _EdgeWeights(torch.autograd.Function):
    """[lanes, edges], the edges in the order of their targets."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors: Tensor | None):
        query = tensors[0]
        assert query is not None
        weights = query.new_empty(len(query), plan.adjacency.num_edges)
        workspace = Workspace()
        for lanes, graph in plan.groups(len(query)):
            scores = weights[lanes].view(-1)
            write_scores(plan, graph, workspace, lanes, tensors, scores)
            totals = exponentiate(scores, graph).squeeze(1)
            scores.div_(totals.index_select(0, graph.target))
        ctx.plan = plan
        ctx.save_for_backward(*tensors, weights)
        return weights

    @staticmethod
    def backward(ctx, gradient: Tensor):
        refuse_second_derivative("edges", gradient, *ctx.saved_tensors)
        plan: Plan = ctx.plan
        *tensors, weights = ctx.saved_tensors
        wanted = {
            name for name, needed in zip(NAMES, ctx.needs_input_grad[1:], strict=True) if needed
        }
        found = {
            name: torch.zeros_like(tensor)
            for name, tensor in zip(NAMES, tensors, strict=True)
            if name in wanted - {"value"}
        }
        workspace = Workspace()
        for lanes, graph in plan.groups(len(weights)):
            # d score_e = weight_e (g_e − Σ weight g over the edges of its target)
            used = weights[lanes].view(-1)
            slopes = gradient[lanes].reshape(-1) * used
            shift = sum_weights(graph, slopes).squeeze(1)
            slopes -= shift.index_select(0, graph.target) * used
            if "bias" in wanted:
                found["bias"][lanes] = slopes.view(-1, plan.adjacency.num_edges)
            scorer = make_scorer(plan, graph, workspace, lanes, tuple(tensors))
            slopes = scorer.node_slopes(slopes)
            by_source = slopes.index_select(0, graph.by_source)
            for name, part in scorer.gradients(slopes, by_source, wanted).items():
                if name == "features" and name in wanted:
                    found[name] += part.view(-1, *found[name].shape).sum(dim=0)
                elif name in wanted:
                    found[name][lanes] = part.view(found[name][lanes].shape)
        return None, *(found.get(name) for name in NAMES)
