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
    ScalarEdges,
    add_feature_products,
    products,
    sum_edges,
    sum_edges_by_source,
    sum_features,
    sum_weights,
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
    scale: float
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
    vector = edge_query = edge_key = rows = key_weight = slope = None
    scale = 1.0
    if features is not None:
        key_weight = features.key_weight
        rows = features.features
        if adjacency.order is not None:
            rows = rows.index_select(0, adjacency.order)
    if isinstance(score, Additive):
        slope = None if score.activation == "tanh" else float(score.negative_slope)
        query = inputs.query
        vector = score.vector.expand(batch, num_heads, -1).flatten(0, 1)
        if key_weight is not None:
            edge_key = key_weight.expand(batch, -1, -1, -1).flatten(0, 1)
    else:
        lowered = replace(inputs, key=key, value=value).lowered()
        query, key, scale = lowered.query, lowered.key, lowered.scale
        if key_weight is not None:
            edge_query = (query @ key_weight).flatten(0, 1)
    plan = _Plan(
        adjacency,
        scale=scale,
        negative_slope=slope,
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
        new = value.new_empty if plan.adjacency.num_edges else value.new_zeros
        output = new(num_lanes, num_targets, value.shape[2])
        summed = features if plan.sums_features else None
        edge_dim = 0 if summed is None else summed.shape[1]
        sums = new(num_lanes, num_targets, edge_dim)
        weights = value.new_empty(num_lanes, plan.adjacency.num_edges)
        totals = value.new_ones(num_lanes, num_targets, 1)
        memory = _Memory()
        for lanes, graph in plan.groups(num_lanes):
            scores = weights[lanes].view(-1)
            _scorer(plan, graph, memory, lanes, tensors).scores(scores)
            _exponentiate(scores, graph)
            total = sum_weights(graph, scores)
            total.masked_fill_(total == 0, 1.0)  # nobody to look at: the sums are 0 as well
            keep = plan.keep(lanes, scores)
            kept = scores if keep is None else keep.mul_(scores)
            _rows(totals, lanes).copy_(total)
            value_sums = sum_edges(graph, kept, memory.table("value", value, lanes))
            torch.div(value_sums, total, out=_rows(output, lanes))
            if summed is not None:
                rows = _features_of(summed, lanes)
                torch.div(sum_features(graph, kept, rows), total, out=_rows(sums, lanes))
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
        added = {"features"} if plan.adjacency.num_edges else set(_NAMES)
        found = {
            name: (torch.zeros_like if name in added else torch.empty_like)(tensor)
            for name, tensor in zip(_NAMES, tensors, strict=True)
            if tensor is not None
        }
        memory = _Memory()
        for lanes, graph in plan.groups(len(query)):
            kept = used = weights[lanes].view(-1)
            by_target = memory.new("gradient", gradient, lanes)
            shape = gradient[lanes].shape
            torch.div(gradient[lanes], totals[lanes], out=by_target.view(shape))
            products_of_rows = memory.new("products", gradient, lanes)
            shift = torch.mul(by_target, _rows(output, lanes), out=products_of_rows).sum(dim=1)
            slopes = torch.empty_like(used)
            products(graph, by_target, memory.table("value", value, lanes), slopes)
            features_by_target = None
            if sums_gradient is not None and plan.sums_features:
                features_by_target = (sums_gradient[lanes] / totals[lanes]).flatten(0, 1)
                shift += (features_by_target * _rows(sums, lanes)).sum(dim=1)
                rows = _features_of(features, lanes)
                add_feature_products(graph, features_by_target, rows, slopes)
            keep = plan.keep(lanes, used)
            if keep is not None:
                slopes.mul_(keep)
                kept = keep.mul_(used)
            slopes.sub_(shift.index_select(0, graph.target)).mul_(used)
            scorer = _scorer(plan, graph, memory, lanes, tensors)
            node_slopes = scorer.node_slopes(slopes)
            kept_by_source, slopes_by_source = _by_source(graph, kept, node_slopes)
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
        return None, *(found[name] if name in wanted else None for name in _NAMES)


_NAMES = ("query", "key", "value", "vector", "edge_query", "edge_key", "features")


def _scorer(
    plan: _Plan,
    graph: Adjacency,
    memory: _Memory,
    lanes: slice,
    tensors: tuple[Tensor | None, ...],
) -> AdditiveEdges | DotEdges:
    query, key, _, vector, edge_query, edge_key, features = tensors
    assert query is not None
    assert key is not None
    rows = None if features is None else _features_of(features, lanes)
    if vector is None:
        tables = memory.table("query", query, lanes), memory.table("key", key, lanes)
        edge_table = None if edge_query is None else memory.table("edges", edge_query, lanes)
        return DotEdges(graph, *tables, plan.scale, edge_table, rows)
    kind = ScalarEdges if query.shape[2] == 1 else AdditiveEdges
    return kind(
        graph,
        memory.joint_table(query, key, lanes),
        vector[lanes],
        plan.negative_slope,
        None if edge_key is None else edge_key[lanes],
        rows,
    )


class _Memory:
    """Tables of some lanes, [nodes, channels], whose memory serves one group after the other: new
    memory costs more than what is done with it."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def table(self, name: str, tensor: Tensor, lanes: slice) -> Tensor:
        """The rows of all nodes, one lane after the other."""
        rows = tensor[lanes]
        if rows.is_contiguous():
            return rows.flatten(0, 1)
        table = self.new(name, tensor, lanes)
        table.view(rows.shape).copy_(rows)
        return table

    def joint_table(self, query: Tensor, key: Tensor, lanes: slice) -> Tensor:
        """The rows of all targets, then of all sources."""
        parts = query[lanes], key[lanes]
        sizes = [part.shape[0] * part.shape[1] for part in parts]
        table = self._memory("joint", query, sum(sizes))
        for rows, part in zip(table.split(sizes), parts, strict=True):
            rows.view(part.shape).copy_(part)
        return table

    def new(self, name: str, like: Tensor, lanes: slice) -> Tensor:
        """A table as large as that of `like`, of no known content."""
        return self._memory(name, like, (lanes.stop - lanes.start) * like.shape[1])

    def _memory(self, name: str, like: Tensor, num_rows: int) -> Tensor:
        kept = self.kept.get(name)
        if kept is None or len(kept) < num_rows:
            kept = self.kept[name] = like.new_empty(num_rows, like.shape[2])
        return kept[:num_rows]


def _by_source(graph: Adjacency, *weights: Tensor) -> Tensor:
    """Weights of edges in the order of their sources: read together, since each is a miss of the
    cache."""
    rows = torch.stack(weights, dim=1).index_select(0, graph.by_source)
    return rows.T.contiguous()


def _rows(tensor: Tensor, lanes: slice) -> Tensor:
    """A view of contiguous lanes as a table."""
    return tensor[lanes].view(-1, tensor.shape[2])


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
