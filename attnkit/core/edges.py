"""Attention over the edges of a graph, forward and backward, in memory of edges × heads.

The scores of the edges alone are computed, by products sampled at the edges, and weighted sums of
values by bags of rows: nothing of edges × heads × channels is ever made. Weights are not
normalised edge by edge; with u_e = exp(score_e − shift) and z_i = Σ_e u_e,

    output_i = Σ_e u_e v_e / z_i,   d score_e = u_e (g′_i · v_e − g′_i · output_i),   g′ = g / z
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnkit.core import edges_triton
from attnkit.core.adjacency import Adjacency
from attnkit.core.backend import Backend, empty_reasons
from attnkit.core.edge_scores import (
    AdditiveEdges,
    DotEdges,
    add_feature_products,
    products,
    sum_edges,
    sum_edges_by_source,
    sum_features,
    sum_rows,
)
from attnkit.core.graph import Edges
from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.record import note_kernel
from attnkit.core.scores import Additive, Cosine, Gaussian

__all__ = ["EdgeAttention"]

GROUP = 2**17  # edges × heads up to which the heads of a small graph are computed as one graph
SPREAD = 60.0  # scores that differ by no more have exponentials within float32's range
DENSITY = 16  # products of a full matrix that take as long as one that is sampled


class EdgeAttention(Backend):
    """`Edges`, in time and memory linear in the edges; on CUDA by Triton's kernels where they serve
    (`edges_triton`), else by torch's operators."""

    name = "edges"
    reads_edges = True

    def reasons(self, inputs: Inputs) -> list[str]:
        if not isinstance(inputs.mask, Edges):
            return ["computes edges, and the mask is not Edges alone"]
        reasons = empty_reasons(inputs)
        score, features = inputs.score, inputs.edge_features
        edges = inputs.mask.edge_index.device
        if edges != inputs.query.device:
            reasons.append(f"the edges are on {edges}, the tensors on {inputs.query.device}")
        if inputs.dot_dim is None and not isinstance(score, Additive):
            reasons.append(f"computes dot products and Additive, and the score {score} is neither")
        if score.softcap is not None:
            reasons.append(f"computes no softcap, got {score.softcap}")
        if inputs.bias is not None:
            reasons.append("reads no bias")
        reads_features = features is not None and features.key_weight is not None
        if reads_features and isinstance(score, Cosine | Gaussian):
            reasons.append(f"reads no edge features inside the score {score}")
        return reasons

    def pays(self, inputs: Inputs) -> bool:
        assert isinstance(inputs.mask, Edges)
        if inputs.edge_features is not None:
            return True
        return inputs.mask.num_edges * DENSITY < inputs.num_queries * inputs.num_keys

    def __call__(self, inputs: Inputs) -> Tensor:
        note_kernel(self.name)
        with torch.autocast(inputs.query.device.type, enabled=False):
            if edges_triton.serves(inputs):
                return edges_triton.attend_edges(inputs)
            exact = in_high_precision(inputs)
            plan, lanes = _lanes(exact)
            output, sums = _EdgeSoftmax.apply(plan, *lanes)
            output = output.unflatten(0, inputs.query.shape[:2])
            features = exact.edge_features
            if features is not None and features.value_weight is not None:
                sums = sums.unflatten(0, inputs.query.shape[:2])
                output = output + sums @ features.value_weight.transpose(1, 2)
        return output.to(inputs.query.dtype)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is computed, beside the tensors that have gradients."""

    adjacency: Adjacency
    is_additive: bool
    negative_slope: float | None
    sums_features: bool
    dropout_p: float
    seed: int

    def groups(self, num_lanes: int) -> Iterator[tuple[slice, Adjacency]]:
        """Lanes that are computed at once, and their graphs side by side."""
        num_edges = self.adjacency.num_edges
        if num_edges == 0:  # nothing to compute, all is 0
            return
        size = max(1, min(num_lanes, GROUP // num_edges))
        for first in range(0, num_lanes, size):
            lanes = slice(first, min(first + size, num_lanes))
            yield lanes, self.adjacency.copies(lanes.stop - first)

    def keep(self, lanes: slice, like: Tensor) -> Tensor | None:
        """What dropout multiplies the weights of these lanes by, the same at each call."""
        if self.dropout_p == 0:
            return None
        generator = torch.Generator(like.device).manual_seed(self.seed + lanes.start)
        kept = torch.empty_like(like).bernoulli_(1 - self.dropout_p, generator=generator)
        return kept.div_(1 - self.dropout_p)


def _lanes(inputs: Inputs) -> tuple[_Plan, tuple[Tensor | None, ...]]:
    """The plan, and the tensors of one lane for each batch item and head: query, key, value,
    vector, edge_query, edge_key, features."""
    assert isinstance(inputs.mask, Edges)
    batch, num_heads = inputs.query.shape[:2]
    adjacency, features = inputs.mask.adjacency, inputs.edge_features
    key, value = inputs.repeated_heads()
    score = inputs.score
    vector = edge_query = edge_key = rows = key_weight = None
    if features is not None:
        key_weight = features.key_weight
        rows = features.features
        if adjacency.order is not None:
            rows = rows.index_select(0, adjacency.order)
    if isinstance(score, Additive):
        query, slope = inputs.query, float(score.negative_slope)
        vector = score.vector.expand(batch, num_heads, -1).flatten(0, 1)
        if key_weight is not None:
            edge_key = key_weight.expand(batch, -1, -1, -1).flatten(0, 1)
    else:
        lowered = replace(inputs, key=key, value=value).lowered()
        query, key, slope = lowered.query * lowered.scale, lowered.key, 0.0
        if key_weight is not None:
            edge_query = (query @ key_weight).flatten(0, 1)
    plan = _Plan(
        adjacency,
        is_additive=vector is not None,
        negative_slope=None if getattr(score, "activation", "") == "tanh" else slope,
        sums_features=features is not None and features.value_weight is not None,
        dropout_p=inputs.dropout_p,
        seed=int(torch.randint(2**62, ())) if inputs.dropout_p else 0,
    )
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    return plan, (query, key, value, vector, edge_query, edge_key, rows)


class _EdgeSoftmax(torch.autograd.Function):
    """Outputs [lanes, targets, value_dim], weighted sums of features [lanes, targets, edge_dim]."""

    @staticmethod
    def forward(ctx, plan: _Plan, *tensors: Tensor | None):
        query, _, value, *_, features = tensors
        assert query is not None
        assert value is not None
        num_lanes, num_targets, _ = query.shape
        output = value.new_zeros(num_lanes, num_targets, value.shape[2])
        summed = features if plan.sums_features else None
        edge_dim = 0 if summed is None else summed.shape[1]
        sums = value.new_zeros(num_lanes, num_targets, edge_dim)
        weights = value.new_empty(num_lanes, plan.adjacency.num_edges)
        totals = value.new_ones(num_lanes, num_targets, 1)
        for lanes, graph in plan.groups(num_lanes):
            scores = weights[lanes].view(-1)
            _scorer(plan, graph, lanes, tensors).scores(scores)
            _exponentiate(scores, graph)
            total = sum_rows(scores, graph.offsets)
            total.masked_fill_(total == 0, 1.0)  # nobody to look at: the sums are 0 as well
            keep = plan.keep(lanes, scores)
            kept = scores if keep is None else keep.mul_(scores)
            shape = (lanes.stop - lanes.start, num_targets, -1)
            totals[lanes] = total.view(shape)
            output[lanes] = sum_edges(graph, kept, _table(value, lanes)).div_(total).view(shape)
            if summed is not None:
                rows = _features_of(summed, lanes)
                sums[lanes] = sum_features(graph, kept, rows).div_(total).view(shape)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, weights, totals, output, sums)
        ctx.set_materialize_grads(False)
        return output, sums

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor | None, sums_gradient: Tensor | None):
        plan: _Plan = ctx.plan
        *tensors, weights, totals, output, sums = ctx.saved_tensors
        query, _, value, *_, features = tensors
        if gradient is None:
            gradient = torch.zeros_like(output)
        wanted = {
            name for name, needed in zip(_NAMES, ctx.needs_input_grad[1:], strict=True) if needed
        }
        found = {
            name: torch.zeros_like(tensor)
            for name, tensor in zip(_NAMES, tensors, strict=True)
            if tensor is not None
        }
        for lanes, graph in plan.groups(len(query)):
            total = totals[lanes].view(-1, 1)
            kept = used = weights[lanes].view(-1)
            by_target = _table(gradient, lanes) / total
            shift = (by_target * _table(output, lanes)).sum(dim=1)
            slopes = torch.empty_like(used)
            products(graph, by_target, _table(value, lanes), slopes)
            features_by_target = None
            if sums_gradient is not None and plan.sums_features:
                features_by_target = _table(sums_gradient, lanes) / total
                shift += (features_by_target * _table(sums, lanes)).sum(dim=1)
                rows = _features_of(features, lanes)
                add_feature_products(graph, features_by_target, rows, slopes)
            keep = plan.keep(lanes, used)
            if keep is not None:
                slopes.mul_(keep)
                kept = keep.mul_(used)
            slopes.sub_(shift.index_select(0, graph.target)).mul_(used)
            kept_by_source = kept.index_select(0, graph.by_source)
            value_gradient = sum_edges_by_source(graph, kept_by_source, by_target)
            found["value"][lanes] = value_gradient.view(found["value"][lanes].shape)
            slopes_by_source = torch.index_select(slopes, 0, graph.by_source, out=kept_by_source)
            scorer = _scorer(plan, graph, lanes, tensors)
            for name, part in scorer.gradients(slopes, slopes_by_source, wanted).items():
                if name == "features":
                    found[name] += part.view(-1, *features.shape).sum(dim=0)
                else:
                    found[name][lanes] = part.view(found[name][lanes].shape)
            if features_by_target is not None and "features" in wanted:
                rows = features_by_target.index_select(0, graph.target).mul_(kept[:, None])
                found["features"] += rows.view(-1, *features.shape).sum(dim=0)
        return None, *(found[name] if name in wanted else None for name in _NAMES)


_NAMES = ("query", "key", "value", "vector", "edge_query", "edge_key", "features")


def _scorer(
    plan: _Plan, graph: Adjacency, lanes: slice, tensors: tuple[Tensor | None, ...]
) -> AdditiveEdges | DotEdges:
    query, key, _, vector, edge_query, edge_key, features = tensors
    assert query is not None
    assert key is not None
    rows = None if features is None else _features_of(features, lanes)
    if vector is None:
        edge_table = None if edge_query is None else _table(edge_query, lanes)
        return DotEdges(graph, _table(query, lanes), _table(key, lanes), edge_table, rows)
    return AdditiveEdges(
        graph,
        _table(query, lanes),
        _table(key, lanes),
        vector[lanes],
        plan.negative_slope,
        None if edge_key is None else edge_key[lanes],
        rows,
    )


def _table(tensor: Tensor, lanes: slice) -> Tensor:
    """Of some lanes, the rows of all nodes, one lane after the other."""
    return tensor[lanes].reshape(-1, tensor.shape[2])


def _features_of(features: Tensor, lanes: slice) -> Tensor:
    """What the edges carry, once for each lane."""
    count = lanes.stop - lanes.start
    return features if count == 1 else features.repeat(count, 1)


def _exponentiate(scores: Tensor, graph: Adjacency) -> None:
    """score_e ← exp(score_e − shift), in place; the shift is common to the edges of a target."""
    low, high = (float(bound) for bound in scores.aminmax())
    if high - low <= SPREAD:
        scores.sub_(high).exp_()  # one number does for all targets, at less cost
        return
    largest = torch.segment_reduce(scores, "max", offsets=graph.offsets.long(), initial=-torch.inf)
    scores.sub_(largest.index_select(0, graph.target)).exp_()
