"""Attention over the edges of a graph, forward and backward, in memory of edges × heads.

The scores of the edges alone are computed, by products sampled at the edges, and weighted sums of
values by bags of rows: nothing of edges × heads × channels is ever made. Weights are not
normalized edge by edge; with u_e = exp(score_e − shift) and z_i = Σ_e u_e,

    output_i = Σ_e u_e v_e / z_i,   d score_e = u_e (g′_i · v_e − g′_i · output_i),   g′ = g / z
"""

import torch
from torch import Tensor

from attnkit.core.kernels.base import refuse_second_derivative
from attnkit.core.kernels.edges.lanes import (
    NAMES,
    Plan,
    Tensors,
    Workspace,
    exponentiate,
    features_of,
    make_scorer,
    write_scores,
)
from attnkit.core.kernels.edges.scores import (
    add_feature_products,
    products,
    sum_edges,
    sum_edges_by_source,
    sum_features,
)


class EdgeSoftmax(torch.autograd.Function):
    """Outputs [lanes, targets, value_dim], weighted sums of features [lanes, targets, edge_dim]."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors: Tensor | None):
        results = forward(plan, tensors)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, *results)
        ctx.set_materialize_grads(False)
        return results[:2]

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        refuse_second_derivative("edges", *gradients, *ctx.saved_tensors)
        tensors, results = ctx.saved_tensors[: len(NAMES)], ctx.saved_tensors[len(NAMES) :]
        needed = zip(NAMES, ctx.needs_input_grad[1:], strict=True)
        wanted = {name for name, is_needed in needed if is_needed}
        found = backward(ctx.plan, tensors, results, gradients, wanted)
        return None, *(found.get(name) for name in NAMES)


def forward(plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs [lanes, targets, value_dim], weighted sums of features [lanes, targets,
    edge_dim]; and what `backward` reads, exponentials [lanes, edges] and their sums
    [lanes, targets, 1]."""
    query, _, value, *_, features, _ = tensors
    assert query is not None
    assert value is not None
    num_lanes, num_targets, _ = query.shape
    new = value.new_empty if plan.adjacency.num_edges else value.new_zeros
    output = new(num_lanes, num_targets, value.shape[2])
    summed = features if plan.sums_features else None
    edge_dim = 0 if summed is None else summed.shape[1]
    sums = new(num_lanes, num_targets, edge_dim)
    weights = value.new_empty(num_lanes, plan.adjacency.num_edges)
    totals = value.new_ones(num_lanes, num_targets, 1)
    workspace = Workspace()
    for lanes, graph in plan.groups(num_lanes):
        scores = weights[lanes].view(-1)
        write_scores(plan, graph, workspace, lanes, tensors, scores)
        total = exponentiate(scores, graph)
        keep = plan.keep(lanes, scores)
        kept = scores if keep is None else keep.mul_(scores)
        _rows(totals, lanes).copy_(total)
        value_sums = sum_edges(graph, kept, workspace.table("value", value, lanes))
        torch.div(value_sums, total, out=_rows(output, lanes))
        if summed is not None:
            rows = features_of(summed, lanes)
            torch.div(sum_features(graph, kept, rows), total, out=_rows(sums, lanes))
    return output, sums, weights, totals


def backward(
    plan: Plan,
    tensors: Tensors,
    results: tuple[Tensor, ...],
    gradients: tuple[Tensor | None, ...],
    wanted: set[str],
) -> dict[str, Tensor]:
    """The gradients of the wanted tensors, from those of the first two results; by name."""
    query, _, value, *_, features, _ = tensors
    assert query is not None
    assert value is not None
    output, sums, weights, totals = results
    gradient, sums_gradient = gradients
    if gradient is None:
        gradient = torch.zeros_like(output)
    added = {"features"} if plan.adjacency.num_edges else set(NAMES)
    found = {
        name: (torch.zeros_like if name in added else torch.empty_like)(tensor)
        for name, tensor in zip(NAMES, tensors, strict=True)
        if tensor is not None
    }
    _ = plan.adjacency.by_source  # sorted once, for all copies of the graph
    workspace = Workspace()
    for lanes, graph in plan.groups(len(query)):
        kept = used = weights[lanes].view(-1)
        by_target = workspace.new("gradient", gradient, lanes)
        shape = gradient[lanes].shape
        torch.div(gradient[lanes], totals[lanes], out=by_target.view(shape))
        products_of_rows = workspace.new("products", gradient, lanes)
        shift = torch.mul(by_target, _rows(output, lanes), out=products_of_rows).sum(dim=1)
        slopes = torch.empty_like(used)
        products(graph, by_target, workspace.table("value", value, lanes), slopes)
        features_by_target = None
        if sums_gradient is not None and plan.sums_features:
            assert features is not None
            features_by_target = (sums_gradient[lanes] / totals[lanes]).flatten(0, 1)
            shift += (features_by_target * _rows(sums, lanes)).sum(dim=1)
            rows = features_of(features, lanes)
            add_feature_products(graph, features_by_target, rows, slopes)
        keep = plan.keep(lanes, used)
        if keep is not None:
            slopes.mul_(keep)
            kept = keep.mul_(used)
        slopes.sub_(shift.index_select(0, graph.target)).mul_(used)
        if "bias" in wanted:
            found["bias"][lanes] = slopes.view(-1, plan.adjacency.num_edges)
        scorer = make_scorer(plan, graph, workspace, lanes, tensors)
        node_slopes = scorer.node_slopes(slopes)
        kept_by_source = kept.index_select(0, graph.by_source)
        slopes_by_source = node_slopes.index_select(0, graph.by_source)
        parts = scorer.gradients(node_slopes, slopes_by_source, wanted)
        parts["value"] = sum_edges_by_source(graph, kept_by_source, by_target)
        for name in wanted & parts.keys():
            if name == "features":
                found[name] += parts[name].view(-1, *found[name].shape).sum(dim=0)
            elif lanes.stop - lanes.start == len(query):
                found[name] = parts[name].view_as(found[name])  # all lanes at once
            else:
                found[name][lanes] = parts[name].view_as(found[name][lanes])
        if features_by_target is not None and "features" in wanted:
            rows = features_by_target.index_select(0, graph.target).mul_(kept[:, None])
            found["features"] += rows.view(-1, *found["features"].shape).sum(dim=0)
    return {name: found[name] for name in wanted}


def _rows(tensor: Tensor, lanes: slice) -> Tensor:
    """A view of contiguous lanes as a table."""
    return tensor[lanes].view(-1, tensor.shape[2])
