"""Attention over the edges of a graph, forward and backward, in memory of edges × heads.

The scores of the edges alone are computed, by products sampled at the edges, and weighted sums of
values by bags of rows: nothing of edges × heads × channels is ever made. Weights are not
normalized edge by edge; with u_e = exp(score_e − shift) and z_i = Σ_e u_e,

    output_i = Σ_e u_e v_e / z_i,   d score_e = u_e (g′_i · v_e − g′_i · output_i),   g′ = g / z
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import (
    Backend,
    empty_reasons,
    functorch_reasons,
    refuse_second_derivative,
)
from attnkit.core.kernels.edges.lanes import (
    NAMES,
    Plan,
    Workspace,
    as_lanes,
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
    sum_weights,
)
from attnkit.core.masks.edges import Edges
from attnkit.core.precision import no_autocast
from attnkit.core.scores.kinds import Additive, Cosine, Gaussian

DENSITY = 16  # products of a full matrix that take as long as one that is sampled


class EdgesKernel(Backend):
    """`Edges`, in time and memory linear in the edges, by torch's operators."""

    name = "edges"
    needs_mask = "mask=Edges(…) and no other mask"
    reads_edges = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        if not isinstance(inputs.mask, Edges):
            if inputs.mask is not None:
                yield f"needs {self.needs_mask}"
            return
        yield from empty_reasons(inputs)
        score, features = inputs.score, inputs.edge_features
        edges = inputs.mask.edge_index.device
        if edges != inputs.query.device:
            yield f"needs edges on {inputs.query.device}, as the tensors, got {edges}"
        if inputs.dot_dim is None and not isinstance(score, Additive):
            yield f"needs a dot-product score or Additive, got {score}"
        if score.softcap is not None:
            yield f"cannot compute a softcap, got {score.softcap}"
        if inputs.bias is not None:
            yield "cannot read a bias"
        if torch.compiler.is_exporting():
            yield "sorts the edges as it finds them, which an exported program cannot"
        yield from functorch_reasons()
        reads_features = features is not None and features.key_weight is not None
        if reads_features and isinstance(score, Cosine | Gaussian):
            yield f"cannot read edge features inside the score {score}"

    def pays(self, inputs: Inputs) -> bool:
        assert isinstance(inputs.mask, Edges)
        if inputs.edge_features is not None:
            return True
        return inputs.mask.num_edges * DENSITY < inputs.num_queries * inputs.num_keys

    def compute(self, inputs: Inputs) -> Tensor:
        with no_autocast(inputs.query):
            exact = in_high_precision(inputs)
            plan, lanes = as_lanes(exact)
            output, sums = _EdgeSoftmax.apply(plan, *lanes)
            output = output.unflatten(0, inputs.query.shape[:2])
            features = exact.edge_features
            if features is not None and features.value_weight is not None:
                sums = sums.unflatten(0, inputs.query.shape[:2])
                output = output + sums @ features.value_weight.transpose(1, 2)
        return output.to(inputs.query.dtype)


class _EdgeSoftmax(torch.autograd.Function):
    """Outputs [lanes, targets, value_dim], weighted sums of features [lanes, targets, edge_dim]."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors: Tensor | None):
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
            exponentiate(scores, graph)
            total = sum_weights(graph, scores)
            total.masked_fill_(total == 0, 1.0)  # nobody to look at: the sums are 0 as well
            keep = plan.keep(lanes, scores)
            kept = scores if keep is None else keep.mul_(scores)
            _rows(totals, lanes).copy_(total)
            value_sums = sum_edges(graph, kept, workspace.table("value", value, lanes))
            torch.div(value_sums, total, out=_rows(output, lanes))
            if summed is not None:
                rows = features_of(summed, lanes)
                torch.div(sum_features(graph, kept, rows), total, out=_rows(sums, lanes))
        ctx.plan = plan
        ctx.save_for_backward(*tensors, weights, totals, output, sums)
        ctx.set_materialize_grads(False)
        return output, sums

    @staticmethod
    def backward(ctx, gradient: Tensor | None, sums_gradient: Tensor | None):
        refuse_second_derivative("edges", gradient, sums_gradient, *ctx.saved_tensors)
        plan: Plan = ctx.plan
        *tensors, weights, totals, output, sums = ctx.saved_tensors
        query, _, value, *_, features, _ = tensors
        if gradient is None:
            gradient = torch.zeros_like(output)
        wanted = {
            name for name, needed in zip(NAMES, ctx.needs_input_grad[1:], strict=True) if needed
        }
        added = {"features"} if plan.adjacency.num_edges else set(NAMES)
        found = {
            name: (torch.zeros_like if name in added else torch.empty_like)(tensor)
            for name, tensor in zip(NAMES, tensors, strict=True)
            if tensor is not None
        }
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
                    found[name] += parts[name].view(-1, *features.shape).sum(dim=0)
                elif lanes.stop - lanes.start == len(query):
                    found[name] = parts[name].view_as(found[name])  # all lanes at once
                else:
                    found[name][lanes] = parts[name].view_as(found[name][lanes])
            if features_by_target is not None and "features" in wanted:
                rows = features_by_target.index_select(0, graph.target).mul_(kept[:, None])
                found["features"] += rows.view(-1, *features.shape).sum(dim=0)
        return None, *(found[name] if name in wanted else None for name in NAMES)


def _rows(tensor: Tensor, lanes: slice) -> Tensor:
    """A view of contiguous lanes as a table."""
    return tensor[lanes].view(-1, tensor.shape[2])
