"""Scores of edges and their gradients, by torch's operators, without a tensor of edges × channels.

A group consists of lanes that are computed at once. The lanes of a small graph are computed as one
graph of several copies; those of a large graph one after the other, in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.kernels.base import multiple_of_8, with_channels
from attnkit.core.kernels.edges.problem import EdgeProblem
from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.operators.cpu import keep_mask

GROUP = 2**17  # edges × heads up to which the heads of a small graph are computed as one graph
BLOCK = 2**17  # numbers of a block of edges × channels: half a megabyte, which stays in the cache
SPREAD = 60.0  # the exponentials of scores that differ by less are within float32's range


@dataclass(eq=False)
class Group:
    """Some lanes of a problem, and a graph with a copy for each lane.

    Tables are [nodes, channels], with the nodes of one lane after those of the previous. All groups
    share the memory of tables, because allocating memory costs more than the work in it.
    """

    problem: EdgeProblem
    lanes: slice
    graph: Adjacency
    memory: dict[str, Tensor]

    def table(self, name: str) -> Tensor:
        """Return the rows of all nodes of a tensor."""
        tensor = getattr(self.problem, name)
        rows = tensor[self.lanes]
        if rows.is_contiguous():
            return rows.flatten(0, 1)
        table = self.new(name, tensor)
        table.view(rows.shape).copy_(rows)
        return table

    def joint_table(self) -> Tensor:
        """Return the rows of all queries, then of all keys."""
        parts = self.problem.query[self.lanes], self.problem.key[self.lanes]
        sizes = [part.shape[0] * part.shape[1] for part in parts]
        table = self._rows("joint", parts[0], sum(sizes))
        for rows, part in zip(table.split(sizes), parts, strict=True):
            rows.view(part.shape).copy_(part)
        return table

    def new(self, name: str, like: Tensor) -> Tensor:
        """Return an uninitialized table of the size of `like`."""
        return self._rows(name, like, (self.lanes.stop - self.lanes.start) * like.shape[1])

    def _rows(self, name: str, like: Tensor, num_rows: int) -> Tensor:
        kept = self.memory.get(name)
        if kept is None or len(kept) < num_rows:
            kept = self.memory[name] = like.new_empty(num_rows, like.shape[2])
        return kept[:num_rows]

    def features(self) -> Tensor:
        """Return the features of the edges, repeated for each lane."""
        features, count = self.problem.features, self.lanes.stop - self.lanes.start
        assert features is not None
        return features if count == 1 else features.repeat(count, 1)

    def keep(self, like: Tensor) -> Tensor | None:
        """Return the factors of dropout, the same at each call; None without dropout."""
        problem = self.problem
        if problem.seed is None:
            return None
        seed = int(problem.seed) + self.lanes.start
        generator = torch.Generator(like.device).manual_seed(seed)
        return keep_mask(like, problem.dropout_p, generator)

    def scorer(self) -> DotEdges | AdditiveEdges:
        """Return the object that computes the scores and their gradients."""
        if self.problem.vector is None:
            return DotEdges(self)
        return (ScalarEdges if self.problem.query.shape[2] == 1 else AdditiveEdges)(self)

    def exponentials(self, out: Tensor) -> Tensor:
        """Write exp(score_e − shift) to `out`, [edges]; the shift is common to the edges of a
        target.

        Returns the divisors of the sums, [targets, 1]: Σ_e exp(score_e − shift), plus
        exp(sink − shift) if there is a sink. A divisor of 0, for a target without edges or with
        scores of −∞ only, is replaced by 1.
        """
        self.scorer().scores(out)
        if self.problem.bias is not None:
            out += self.problem.bias[self.lanes].reshape(-1)
        bounds, sinks = [*out.aminmax()], None
        if self.problem.sink is not None:
            lanes = self.problem.sink[self.lanes].flatten()
            sinks = lanes.repeat_interleave(self.graph.num_targets // len(lanes))
            bounds += lanes.aminmax()
        low, high = float(min(bounds)), float(max(bounds))
        if high - low <= SPREAD:
            shift: float | Tensor = high  # one number suffices for all targets and costs less
            out.sub_(high).exp_()
        else:
            offsets = self.graph.offsets.long()
            largest = torch.segment_reduce(out, "max", offsets=offsets, initial=-torch.inf)
            if sinks is not None:
                largest = largest.maximum(sinks)
            shift = largest.masked_fill_(largest == -torch.inf, 0.0)  # −∞ − −∞ would be NaN
            out.sub_(largest.index_select(0, self.graph.target)).exp_()
        totals = sum_weights(self.graph, out)
        if sinks is not None:
            totals += (sinks - shift).exp_()[:, None]
        return totals.masked_fill_(totals == 0, 1.0)

    def add_gradients(
        self, found: dict[str, Tensor], slopes: Tensor, parts: dict[str, Tensor]
    ) -> None:
        """Add the gradients of this group to `found`: those of the scores' tensors, computed from
        `slopes`, the gradients of the scores, which are overwritten, and those in `parts`."""
        if "bias" in found:
            found["bias"][self.lanes] = slopes.view(-1, self.problem.adjacency.num_edges)
        parts |= self.scorer().gradients(slopes, set(found))
        is_whole = self.lanes.stop - self.lanes.start == len(self.problem.query)
        for name in found.keys() & parts.keys():
            if name == "features":
                found[name] += parts[name].view(-1, *found[name].shape).sum(dim=0)
            elif is_whole:
                found[name] = parts[name].view_as(found[name])  # all lanes at once
            else:
                found[name][self.lanes] = parts[name].view_as(found[name][self.lanes])


def groups(problem: EdgeProblem) -> Iterator[Group]:
    """Yield the groups of all lanes; none without edges, where all results are 0."""
    graph, num_lanes = problem.adjacency, len(problem.query)
    if graph.num_edges == 0:
        return
    size = max(1, min(num_lanes, GROUP // graph.num_edges))
    memory: dict[str, Tensor] = {}
    for first in range(0, num_lanes, size):
        lanes = slice(first, min(first + size, num_lanes))
        yield Group(problem, lanes, graph.copies(lanes.stop - first), memory)


def new_gradients(problem: EdgeProblem, wanted: set[str]) -> dict[str, Tensor]:
    """Return the tensors to which `Group.add_gradients` adds."""
    _ = problem.adjacency.by_source  # sorts once, for all copies of the graph
    has_edges = problem.adjacency.num_edges > 0
    found = {}
    for name in wanted:
        new = torch.empty_like if has_edges and name != "features" else torch.zeros_like
        found[name] = new(getattr(problem, name))
    return found


class DotEdges:
    """score_e = scale · (query[target_e] · key[source_e] + edge_query[target_e] · e)."""

    def __init__(self, group: Group) -> None:
        self.graph, self.scale = group.graph, group.problem.scale
        self.query, self.key = group.table("query"), group.table("key")
        self.edge_query = self.features = None
        if group.problem.edge_query is not None:
            self.edge_query, self.features = group.table("edge_query"), group.features()

    def scores(self, out: Tensor) -> None:
        """Write the scores to `out`, [edges]."""
        products(self.graph, self.query, self.key, out, self.scale)
        if self.edge_query is not None and self.features is not None:
            add_feature_products(self.graph, self.edge_query, self.features, out, self.scale)

    def gradients(self, slopes: Tensor, wanted: set[str]) -> dict[str, Tensor]:
        """Compute the gradients of the scores' tensors from `slopes`, those of the scores; `slopes`
        is overwritten."""
        graph, found = self.graph, {}
        if self.scale != 1:
            slopes.mul_(self.scale)
        if "query" in wanted:
            found["query"] = sum_edges(graph, slopes, self.key)
        if "key" in wanted:
            by_source = slopes.index_select(0, graph.by_source)
            found["key"] = sum_edges_by_source(graph, by_source, self.query)
        if self.edge_query is not None and self.features is not None:
            found["edge_query"] = sum_features(graph, slopes, self.features)
            if "features" in wanted:
                rows = self.edge_query.index_select(0, graph.target)
                found["features"] = rows.mul_(slopes[:, None])
        return found


class AdditiveEdges:
    """score_e = vectorᵀ activation(query[target_e] + key[source_e] + edge_key e).

    The table has the rows of all queries, then those of all keys, each in the order of the group's
    heads, which have a vector [heads, channels] and edge_key [heads, channels, edge_dim].
    """

    def __init__(self, group: Group) -> None:
        problem = group.problem
        assert problem.vector is not None
        self.graph, self.table = group.graph, group.joint_table()
        self.vector, self.negative_slope = problem.vector[group.lanes], problem.negative_slope
        self.edge_key = self.features = None
        if problem.edge_key is not None:
            self.edge_key, self.features = problem.edge_key[group.lanes], group.features()

    @property
    def block_size(self) -> int:
        """The edges of a block; all edges for a group of several heads, whose graph is small."""
        is_group = len(self.vector) > 1
        return self.graph.num_edges if is_group else max(1, BLOCK // self.table.shape[1])

    def scores(self, out: Tensor) -> None:
        """Write the scores to `out`, [edges]."""
        heads, channels = self.vector.shape
        for first in range(0, self.graph.num_edges, self.block_size):
            edges = slice(first, min(first + self.block_size, self.graph.num_edges))
            active = self._active(self.graph.pairs, edges).view(heads, -1, channels)
            # in a loop: torch's batched product with a vector takes several times as long
            for rows, vector, scores in zip(
                active, self.vector, out[edges].view(heads, -1), strict=True
            ):
                torch.mv(rows, vector, out=scores)

    def gradients(self, slopes: Tensor, wanted: set[str]) -> dict[str, Tensor]:
        """Compute the gradients of the scores' tensors from `slopes`, those of the scores, which
        may be overwritten."""
        graph, (heads, channels) = self.graph, self.vector.shape
        by_source = slopes.index_select(0, graph.by_source)
        found = {
            "query": self.table.new_empty(graph.num_targets, channels),
            "key": self.table.new_empty(graph.num_sources, channels),
            "vector": torch.zeros_like(self.vector),
        }
        if self.edge_key is not None and self.features is not None:
            found["edge_key"] = torch.zeros_like(self.edge_key)
            found["features"] = torch.empty_like(self.features)
        blocks = graph.blocks(self.block_size)
        for first, last, start, stop in blocks:
            edges = slice(start, stop)
            active = self._active(graph.pairs, edges)
            weights = slopes[edges].view(heads, -1, 1)
            if "vector" in wanted:
                by_head = zip(active.view(heads, -1, channels), weights, strict=True)
                found["vector"] += torch.stack([rows.T @ column[:, 0] for rows, column in by_head])
            derivatives = self._derivatives(active)
            ends = graph.offsets[first : last + 1] - start
            found["query"][first:last] = _bag(
                graph.places[: stop - start], derivatives, ends, slopes[edges]
            )
            if "key" in wanted and len(blocks) == 1:
                found["key"] = _bag(graph.by_source, derivatives, graph.source_offsets, by_source)
            if self.edge_key is not None and self.features is not None:
                inner = derivatives.view(heads, -1, channels).mul_(weights)
                inner.mul_(self.vector[:, None])
                rows = self.features[edges].view(heads, -1, self.features.shape[1])
                found["edge_key"] += inner.transpose(1, 2) @ rows
                if "features" in wanted:
                    found["features"][edges] = (inner @ self.edge_key).flatten(0, 1)
        if "key" in wanted and len(blocks) > 1:
            for first, last, start, stop in graph.blocks(self.block_size, by_source=True):
                edges = slice(start, stop)
                active = self._active(graph.pairs_by_source, edges, graph.by_source)
                ends = graph.source_offsets[first : last + 1] - start
                found["key"][first:last] = _bag(
                    graph.places[: stop - start], self._derivatives(active), ends, by_source[edges]
                )
        for name in ("query", "key"):
            found[name].view(heads, -1, channels).mul_(self.vector[:, None])
        return found

    def _active(self, pairs: Tensor, edges: slice, order: Tensor | None = None) -> Tensor:
        """Compute activation(q + k + edge_key e) of some edges, [edges, channels]."""
        count = edges.stop - edges.start
        # each bag has two rows, which are gathered and added at once
        ends = torch.arange(0, 2 * count + 1, 2, dtype=pairs.dtype, device=pairs.device)
        sums = _bag(pairs[2 * edges.start : 2 * edges.stop], self.table, ends, None)
        if self.edge_key is not None:
            assert self.features is not None
            rows = self.features[edges] if order is None else self.features[order[edges]]
            heads = len(self.edge_key)
            sums.view(heads, -1, sums.shape[1]).baddbmm_(
                rows.view(heads, -1, rows.shape[1]), self.edge_key.transpose(1, 2)
            )
        return self._activated(sums)

    def _activated(self, sums: Tensor) -> Tensor:
        """Compute the activation in place."""
        if self.negative_slope is None:
            return sums.tanh_()
        return F.leaky_relu_(sums, self.negative_slope)

    def _derivatives(self, active: Tensor) -> Tensor:
        """Compute the activation's derivative from the activation, in place."""
        if self.negative_slope is None:  # 1 − tanh²
            return active.square_().neg_().add_(1)
        # 1 where the sum was positive, else the slope
        return (
            torch.gt(active, 0, out=active).mul_(1 - self.negative_slope).add_(self.negative_slope)
        )


class ScalarEdges(AdditiveEdges):
    """`AdditiveEdges` with one channel, as in GAT, which needs no blocks for its small tensors."""

    def scores(self, out: Tensor) -> None:
        """Write the scores to `out`, [edges]."""
        heads = len(self.vector)
        torch.mul(self._numbers().view(heads, -1), self.vector, out=out.view(heads, -1))

    def gradients(self, slopes: Tensor, wanted: set[str]) -> dict[str, Tensor]:
        """Compute the gradients of the scores' tensors from `slopes`, those of the scores."""
        graph, active, heads = self.graph, self._numbers(), len(self.vector)
        found = {"vector": torch.bmm(active.view(heads, 1, -1), slopes.view(heads, -1, 1))}
        slopes = self._derivatives(active).mul_(slopes)
        slopes.view(heads, -1).mul_(self.vector)
        found["query"] = sum_weights(graph, slopes)
        found["key"] = sum_weights_by_source(graph, slopes.index_select(0, graph.by_source))
        if self.edge_key is not None and self.features is not None:
            rows = self.features.view(heads, -1, self.features.shape[1])
            found["edge_key"] = torch.bmm(slopes.view(heads, 1, -1), rows)
            if "features" in wanted:
                found["features"] = (slopes.view(heads, -1, 1) * self.edge_key).flatten(0, 1)
        return found

    def _numbers(self) -> Tensor:
        """Compute activation(q + k + edge_key e), [edges]."""
        graph, table = self.graph, self.table.flatten()
        sums = table.index_select(0, graph.target)
        sums += table[graph.num_targets :].index_select(0, graph.source)
        if self.edge_key is not None and self.features is not None:
            heads = len(self.edge_key)
            rows = self.features.view(heads, -1, self.features.shape[1])
            sums.view(heads, -1, 1).baddbmm_(rows, self.edge_key.transpose(1, 2))
        return self._activated(sums)


def sum_edges(adjacency: Adjacency, weights: Tensor, table: Tensor) -> Tensor:
    """Sum weight_e · table[source_e] over the edges of each target, [targets, channels]."""
    return _bag(adjacency.source, table, adjacency.offsets, weights)


def sum_edges_by_source(adjacency: Adjacency, weights: Tensor, table: Tensor) -> Tensor:
    """Sum weight_e · table[target_e] over the edges of each source, [sources, channels]; the
    weights are in the order of sources."""
    return _bag(adjacency.target_by_source, table, adjacency.source_offsets, weights)


def sum_features(adjacency: Adjacency, weights: Tensor, features: Tensor) -> Tensor:
    """Sum weight_e · features[e] over the edges of each target, [targets, edge_dim]."""
    return _bag(adjacency.places, features, adjacency.offsets, weights)


def sum_weights(adjacency: Adjacency, weights: Tensor) -> Tensor:
    """Sum weight_e over the edges of each target, [targets, 1]."""
    return _bag(adjacency.zeros, weights.new_ones(1, 1), adjacency.offsets, weights)


def sum_weights_by_source(adjacency: Adjacency, weights: Tensor) -> Tensor:
    """Sum weight_e over the edges of each source, [sources, 1]; the weights are in their order."""
    return _bag(adjacency.zeros, weights.new_ones(1, 1), adjacency.source_offsets, weights)


def products(
    adjacency: Adjacency, by_target: Tensor, by_source: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    """Write scale · by_target[target_e] · by_source[source_e] to `out`."""
    if len(out) > len(by_target) * len(by_source):
        # with so many duplicate edges torch's sparse matrix cannot hold them
        everything = (by_target @ by_source.T).flatten()
        places = adjacency.target.long() * len(by_source) + adjacency.source
        torch.index_select(everything.mul_(scale), 0, places, out=out)
        return
    channels = multiple_of_8(by_target.shape[1])  # torch takes ten times as long for others
    by_target, by_source = with_channels(by_target, channels), with_channels(by_source, channels)
    # zeroed, because torch keeps a NaN in `out` even with beta=0
    matrix = adjacency.pattern(out.zero_())
    torch.sparse.sampled_addmm(matrix, by_target, by_source.T, alpha=scale, out=matrix)


def add_feature_products(
    adjacency: Adjacency, by_target: Tensor, features: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    """Add scale · by_target[target_e] · features[e] to `out`."""
    matrix = adjacency.edge_pattern(out)
    torch.sparse.sampled_addmm(matrix, by_target, features.T, alpha=scale, out=matrix)


def _bag(indices: Tensor, table: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    # torch's fastest weighted sum of rows: it beats the product with a sparse matrix
    return F.embedding_bag(
        indices, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
