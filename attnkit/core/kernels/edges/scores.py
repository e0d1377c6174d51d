"""Scores of edges, and their gradients, without a tensor of edges × channels.

Each class has the tables of one group of heads, [nodes, channels], and gives the scores of the
edges in the order of their targets. What edges carry, e, is a table too, [edges, edge_dim], of
which each edge reads its own row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.kernels.base import multiple_of_8, with_channels
from attnkit.core.masks.adjacency import Adjacency

BLOCK = 2**17  # numbers of a block of edges × channels: half a megabyte, which stays in the cache


def sum_edges(adjacency: Adjacency, weights: Tensor, table: Tensor) -> Tensor:
    """Σ_e weight_e · table[source_e] over the edges of each target, [targets, channels]."""
    return _bag(adjacency.source, table, adjacency.offsets, weights)


def sum_edges_by_source(adjacency: Adjacency, weights: Tensor, table: Tensor) -> Tensor:
    """Σ_e weight_e · table[target_e] over the edges of each source, [sources, channels]; the
    weights in the order of sources."""
    return _bag(adjacency.target_by_source, table, adjacency.source_offsets, weights)


def sum_features(adjacency: Adjacency, weights: Tensor, features: Tensor) -> Tensor:
    """Σ_e weight_e · features[e] over the edges of each target, [targets, edge_dim]."""
    return _bag(adjacency.places, features, adjacency.offsets, weights)


def sum_weights(adjacency: Adjacency, weights: Tensor) -> Tensor:
    """Σ_e weight_e over the edges of each target, [targets, 1]."""
    return _bag(adjacency.zeros, weights.new_ones(1, 1), adjacency.offsets, weights)


def sum_weights_by_source(adjacency: Adjacency, weights: Tensor) -> Tensor:
    """Σ_e weight_e over the edges of each source, [sources, 1]; the weights in their order."""
    return _bag(adjacency.zeros, weights.new_ones(1, 1), adjacency.source_offsets, weights)


def products(
    adjacency: Adjacency, by_target: Tensor, by_source: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    """out_e ← scale · by_target[target_e] · by_source[source_e], in place."""
    if len(out) > len(by_target) * len(by_source):
        # so many edges are given twice that torch's sparse matrix cannot hold them
        everything = (by_target @ by_source.T).flatten()
        places = adjacency.target.long() * len(by_source) + adjacency.source
        torch.index_select(everything.mul_(scale), 0, places, out=out)
        return
    channels = multiple_of_8(by_target.shape[1])  # torch takes ten times as long for others
    by_target, by_source = with_channels(by_target, channels), with_channels(by_source, channels)
    # with beta=0 torch would still keep a NaN that stands there
    matrix = adjacency.pattern(out.zero_())
    torch.sparse.sampled_addmm(matrix, by_target, by_source.T, alpha=scale, out=matrix)


def add_feature_products(
    adjacency: Adjacency, by_target: Tensor, features: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    """out_e ← out_e + scale · by_target[target_e] · features[e], in place."""
    matrix = adjacency.edge_pattern(out)
    torch.sparse.sampled_addmm(matrix, by_target, features.T, alpha=scale, out=matrix)


def _bag(indices: Tensor, table: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    # torch's fastest weighted sum of rows: it beats the product with a sparse matrix
    return F.embedding_bag(
        indices, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


class DotEdges:
    """score_e = scale · (query[target_e] · key[source_e] + edge_query[target_e] · e)."""

    def __init__(
        self,
        adjacency: Adjacency,
        query: Tensor,
        key: Tensor,
        scale: float,
        edge_query: Tensor | None,
        features: Tensor | None,
    ) -> None:
        self.adjacency = adjacency
        self.query, self.key, self.scale = query, key, scale
        self.edge_query, self.features = edge_query, features

    def scores(self, out: Tensor) -> None:
        """Written to `out`, [edges]."""
        products(self.adjacency, self.query, self.key, out, self.scale)
        if self.edge_query is not None:
            assert self.features is not None
            add_feature_products(self.adjacency, self.edge_query, self.features, out, self.scale)

    def node_slopes(self, gradient: Tensor) -> Tensor:
        """What a node's gradients are sums of, one number for each edge, written over that of the
        scores."""
        return gradient if self.scale == 1 else gradient.mul_(self.scale)

    def gradients(self, gradient: Tensor, by_source: Tensor, wanted: set[str]) -> dict[str, Tensor]:
        """Of query, key, edge_query and features, from `node_slopes` in both orders."""
        found = {}
        if "query" in wanted:
            found["query"] = sum_edges(self.adjacency, gradient, self.key)
        if "key" in wanted:
            found["key"] = sum_edges_by_source(self.adjacency, by_source, self.query)
        if self.edge_query is not None:
            assert self.features is not None
            found["edge_query"] = sum_features(self.adjacency, gradient, self.features)
            if "features" in wanted:
                rows = self.edge_query.index_select(0, self.adjacency.target)
                found["features"] = rows.mul_(gradient[:, None])
        return found


class AdditiveEdges:
    """score_e = vectorᵀ activation(query[target_e] + key[source_e] + edge_key e).

    The table has the rows of all queries, then those of all keys. The heads of a group stand one
    after the other in both, as their graphs do in the adjacency, and have their own vector [heads,
    channels] and edge_key [heads, channels, edge_dim].
    """

    def __init__(
        self,
        adjacency: Adjacency,
        table: Tensor,
        vector: Tensor,
        negative_slope: float | None,
        edge_key: Tensor | None,
        features: Tensor | None,
    ) -> None:
        self.adjacency = adjacency
        self.table = table
        self.vector = vector
        self.negative_slope = negative_slope
        self.edge_key, self.features = edge_key, features

    @property
    def block_size(self) -> int:
        """Edges of a block; all of them for a group of several heads, whose graphs are small."""
        is_group = len(self.vector) > 1
        return self.adjacency.num_edges if is_group else max(1, BLOCK // self.table.shape[1])

    def scores(self, out: Tensor) -> None:
        """Written to `out`, [edges]."""
        heads, channels = self.vector.shape
        for first in range(0, self.adjacency.num_edges, self.block_size):
            edges = slice(first, min(first + self.block_size, self.adjacency.num_edges))
            active = self._active(self.adjacency.pairs, edges).view(heads, -1, channels)
            # one by one: torch's batched product with a vector takes several times as long
            for rows, vector, scores in zip(
                active, self.vector, out[edges].view(heads, -1), strict=True
            ):
                torch.mv(rows, vector, out=scores)

    def node_slopes(self, gradient: Tensor) -> Tensor:
        """What a node's gradients are sums of, one number for each edge."""
        return gradient

    def gradients(self, gradient: Tensor, by_source: Tensor, wanted: set[str]) -> dict[str, Tensor]:
        """Of query, key, vector, edge_key and features, from `node_slopes` in both orders."""
        graph, (heads, channels) = self.adjacency, self.vector.shape
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
            weights = gradient[edges].view(heads, -1, 1)
            if "vector" in wanted:
                by_head = zip(active.view(heads, -1, channels), weights, strict=True)
                found["vector"] += torch.stack([rows.T @ column[:, 0] for rows, column in by_head])
            slopes = self._slopes(active)
            ends = graph.offsets[first : last + 1] - start
            found["query"][first:last] = _bag(
                graph.places[: stop - start], slopes, ends, gradient[edges]
            )
            if "key" in wanted and len(blocks) == 1:
                found["key"] = _bag(graph.by_source, slopes, graph.source_offsets, by_source)
            if self.edge_key is not None and self.features is not None:
                inner = slopes.view(heads, -1, channels).mul_(weights).mul_(self.vector[:, None])
                rows = self.features[edges].view(heads, -1, self.features.shape[1])
                found["edge_key"] += inner.transpose(1, 2) @ rows
                if "features" in wanted:
                    found["features"][edges] = (inner @ self.edge_key).flatten(0, 1)
        if "key" in wanted and len(blocks) > 1:
            for first, last, start, stop in graph.blocks(self.block_size, by_source=True):
                edges = slice(start, stop)
                slopes = self._slopes(self._active(graph.pairs_by_source, edges, graph.by_source))
                ends = graph.source_offsets[first : last + 1] - start
                found["key"][first:last] = _bag(
                    graph.places[: stop - start], slopes, ends, by_source[edges]
                )
        for name in ("query", "key"):
            found[name].view(heads, -1, channels).mul_(self.vector[:, None])
        return found

    def _active(self, pairs: Tensor, edges: slice, order: Tensor | None = None) -> Tensor:
        """activation(q + k + edge_key e) of some edges, [edges, channels]."""
        count = edges.stop - edges.start
        # two rows a bag: their sum, which is gathered and added at once
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
        """The activation, written over its argument."""
        if self.negative_slope is None:
            return sums.tanh_()
        return F.leaky_relu_(sums, self.negative_slope)

    def _slopes(self, active: Tensor) -> Tensor:
        """The activation's derivative, from the activation itself and written over it."""
        if self.negative_slope is None:  # 1 − tanh²
            return active.square_().neg_().add_(1)
        # 1 where the sum was positive, else the slope
        return (
            torch.gt(active, 0, out=active).mul_(1 - self.negative_slope).add_(self.negative_slope)
        )


class ScalarEdges(AdditiveEdges):
    """`AdditiveEdges` of one channel, as in GAT: nothing but numbers of edges, and so no blocks."""

    def scores(self, out: Tensor) -> None:
        """Written to `out`, [edges]."""
        heads = len(self.vector)
        torch.mul(self._numbers().view(heads, -1), self.vector, out=out.view(heads, -1))

    def node_slopes(self, gradient: Tensor) -> Tensor:
        """What a node's gradients are sums of, one number for each edge."""
        active, heads = self._numbers(), len(self.vector)
        self.vector_gradient = torch.bmm(active.view(heads, 1, -1), gradient.view(heads, -1, 1))
        slopes = self._slopes(active).mul_(gradient)
        slopes.view(heads, -1).mul_(self.vector)
        return slopes

    def gradients(self, gradient: Tensor, by_source: Tensor, wanted: set[str]) -> dict[str, Tensor]:
        """Of query, key, vector, edge_key and features, from `node_slopes` in both orders."""
        heads = len(self.vector)
        found = {
            "query": sum_weights(self.adjacency, gradient),
            "key": sum_weights_by_source(self.adjacency, by_source),
            "vector": self.vector_gradient,
        }
        if self.edge_key is not None and self.features is not None:
            rows = self.features.view(heads, -1, self.features.shape[1])
            found["edge_key"] = torch.bmm(gradient.view(heads, 1, -1), rows)
            if "features" in wanted:
                found["features"] = (gradient.view(heads, -1, 1) * self.edge_key).flatten(0, 1)
        return found

    def _numbers(self) -> Tensor:
        """activation(q + k + edge_key e), [edges]."""
        graph, table = self.adjacency, self.table.flatten()
        sums = table.index_select(0, graph.target)
        sums += table[graph.num_targets :].index_select(0, graph.source)
        if self.edge_key is not None and self.features is not None:
            heads = len(self.edge_key)
            rows = self.features.view(heads, -1, self.features.shape[1])
            sums.view(heads, -1, 1).baddbmm_(rows, self.edge_key.transpose(1, 2))
        return self._activated(sums)
