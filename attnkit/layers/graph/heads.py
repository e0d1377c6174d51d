"""From node features to queries, keys and values as heads, for each family of graph scores.

`QueryKeyValueHeads` projects all three, as a Transformer does. In `GATv2Heads` the keys are the
values. In `GATHeads` queries and keys are one number each, since GAT's score is a sum of two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnkit.core.masks.edges import EdgeFeatures
from attnkit.core.operators.linear import linear, reset_linear, run_linear
from attnkit.core.operators.split import split_channels
from attnkit.core.projections import Projections
from attnkit.core.scores.base import Score
from attnkit.core.scores.kinds import Additive
from attnkit.core.scores.learned import AdditiveScore, learned_score


class NodeHeads(NamedTuple):
    """What nodes give to attention: query [heads, targets, head_dim], key [heads, sources,
    head_dim] and value [heads, sources, out_channels]; of a batch with its dimension before."""

    query: Tensor
    key: Tensor
    value: Tensor


class GraphHeads(nn.Module):
    """What the families have in common.

    in_channels: of sources and of targets. edge_dim: channels of the edges, whose projection
    `edge_proj` has no bias; None: they carry nothing.
    """

    def __init__(
        self, in_channels: tuple[int, int], out_channels: int, heads: int, edge_dim: int | None
    ) -> None:
        super().__init__()
        self.heads = heads
        size = heads * out_channels
        self.edge_proj = None if edge_dim is None else nn.Linear(edge_dim, size, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> NodeHeads:
        """The heads of nodes [nodes, channels]; `target` may be `source` itself."""
        raise NotImplementedError

    def own(self, nodes: Tensor) -> Tensor:
        """The nodes' values, [heads, nodes, out_channels]."""
        raise NotImplementedError

    def current_score(self) -> Score:
        """The score with the parameters as they are now."""
        raise NotImplementedError

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        """What edges with these features [edges, edge_dim] add to keys and values."""
        raise NotImplementedError

    def readers(self, sources: int, targets: int) -> list[tuple[nn.Linear, int]]:
        """The layers that read nodes, each with the channels of those that it reads."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices, biases 0, scores as they begin."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                reset_linear(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def _split(self, projected: Tensor) -> Tensor:
        """[nodes, heads · channels] as [heads, nodes, channels]."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def _edge_weight(self) -> Tensor:
        """The projection of the edges by heads, [heads, out_channels, edge_dim]."""
        assert self.edge_proj is not None
        return self.edge_proj.weight.unflatten(0, (self.heads, -1))


class NodeProjections(Projections):
    """Projections whose gradients, which kernels of edges leave side by side, are not copied."""

    def _split(self, projected: Tensor) -> Sequence[Tensor]:
        return split_channels(projected, self.sizes)


class QueryKeyValueHeads(GraphHeads):
    """Queries, keys and values each with a projection, for any score of queries and keys.

    Edges are projected once and added to keys and values, as in Shi et al. 2021.
    """

    def __init__(
        self,
        in_channels: tuple[int, int],
        out_channels: int,
        heads: int,
        edge_dim: int | None = None,
        *,
        score: str | Score | nn.Module,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, edge_dim)
        self.node_proj = NodeProjections(
            in_channels[1], heads, head_dim=out_channels, key_dim=in_channels[0], bias=bias
        )
        self.score = learned_score(score, heads, out_channels)
        self.reset_parameters()

    def forward(self, source: Tensor, target: Tensor) -> NodeHeads:
        return NodeHeads(*self.node_proj.project(target, source, source))

    def own(self, nodes: Tensor) -> Tensor:
        return self.node_proj.project_memory(nodes, nodes)[1]

    def readers(self, sources: int, targets: int) -> list[tuple[nn.Linear, int]]:
        proj = self.node_proj
        if proj.is_fused:
            return [(proj.in_proj, sources)]
        memory = (proj.key_proj, sources), (proj.value_proj, sources)
        return [(proj.query_proj, targets), *memory]

    def current_score(self) -> Score:
        return self.score() if isinstance(self.score, nn.Module) else self.score

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        weight = self._edge_weight()
        return EdgeFeatures(features, key_weight=weight, value_weight=weight)


class GATv2Heads(GraphHeads):
    """Keys that are the values, and the score vᵀ LeakyReLU(q + k + W_e e) (Brody et al. 2022).

    share_weights: queries come from the projection of the keys too.
    """

    def __init__(
        self,
        in_channels: tuple[int, int],
        out_channels: int,
        heads: int,
        edge_dim: int | None = None,
        *,
        negative_slope: float = 0.2,
        share_weights: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, edge_dim)
        size = heads * out_channels
        self.key_proj = nn.Linear(in_channels[0], size, bias=bias)
        self.query_proj = None if share_weights else nn.Linear(in_channels[1], size, bias=bias)
        self.score = AdditiveScore(
            heads, out_channels, activation="leaky_relu", negative_slope=negative_slope
        )
        self.reset_parameters()

    def forward(self, source: Tensor, target: Tensor) -> NodeHeads:
        key = self._split(run_linear(self.key_proj, source))
        if self.query_proj is not None:
            query = self._split(run_linear(self.query_proj, target))
        else:
            query = key if target is source else self.own(target)
        return NodeHeads(query, key, key)

    def own(self, nodes: Tensor) -> Tensor:
        return self._split(run_linear(self.key_proj, nodes))

    def readers(self, sources: int, targets: int) -> list[tuple[nn.Linear, int]]:
        own = [] if self.query_proj is None else [(self.query_proj, targets)]
        return [(self.key_proj, sources), *own]

    def current_score(self) -> Score:
        return self.score()

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        return EdgeFeatures(features, key_weight=self._edge_weight())


class GATHeads(GraphHeads):
    """The score LeakyReLU(a_t·W x_i + a_s·W x_j + a_e·W_e e) (Veličković et al. 2018), which is
    additive with queries a_t·W x_i and keys a_s·W x_j of one channel.

    is_bipartite: targets have a projection of their own, which the scores alone read.
    """

    def __init__(
        self,
        in_channels: tuple[int, int],
        out_channels: int,
        heads: int,
        edge_dim: int | None = None,
        *,
        is_bipartite: bool = False,
        negative_slope: float = 0.2,
        bias: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, edge_dim)
        size = heads * out_channels
        self.negative_slope = negative_slope
        self.value_proj = nn.Linear(in_channels[0], size, bias=bias)
        self.target_proj = nn.Linear(in_channels[1], size, bias=bias) if is_bipartite else None
        self.query_vector = nn.Parameter(torch.empty(heads, out_channels))
        self.key_vector = nn.Parameter(torch.empty(heads, out_channels))
        self.edge_vector = (
            None if edge_dim is None else nn.Parameter(torch.empty(heads, out_channels))
        )
        self.reset_parameters()
        self.current_score()  # names a wrong slope now

    def reset_parameters(self) -> None:
        """Xavier-uniform, each vector being a projection to one number; biases 0."""
        super().reset_parameters()
        bound = (6 / (self.key_vector.shape[1] + 1)) ** 0.5
        for vector in (self.query_vector, self.key_vector, self.edge_vector):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)

    def forward(self, source: Tensor, target: Tensor) -> NodeHeads:
        # a·W x is (a W)·x: a few more rows of W, rather than a product with all values
        values = self.value_proj.weight, self.value_proj.bias
        keys = self._folded(self.key_vector, self.value_proj)
        queries = self._folded(self.query_vector, self.target_proj or self.value_proj)
        if target is source and self.target_proj is None:
            value, key, query = self._heads(source, values, keys, queries)
        else:
            value, key = self._heads(source, values, keys)
            if target.shape[-1]:
                (query,) = self._heads(target, queries)
            else:  # they add nothing to the scores
                query = key.new_zeros(*key.shape[:-2], target.shape[-2], 1)
        return NodeHeads(query, key, value)

    def _folded(self, vector: Tensor, proj: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Weight [heads, in_channels] and bias of a·(W x + b)."""
        weight = vector[:, None] @ proj.weight.unflatten(0, (self.heads, -1))
        if proj.bias is None:
            return weight.squeeze(1), None
        return weight.squeeze(1), (vector * proj.bias.unflatten(0, (self.heads, -1))).sum(dim=1)

    def _heads(self, nodes: Tensor, *rows: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        """What each weight and bias make of the nodes, in one product, as heads."""
        weights, biases = zip(*rows, strict=True)
        bias = None if biases[0] is None else torch.cat(biases)
        projected = linear(nodes, torch.cat(weights), bias)
        return [self._split(part) for part in projected.split([len(w) for w in weights], dim=-1)]

    def own(self, nodes: Tensor) -> Tensor:
        return self._split(run_linear(self.value_proj, nodes))

    def readers(self, sources: int, targets: int) -> list[tuple[nn.Linear, int]]:
        own = [] if self.target_proj is None else [(self.target_proj, targets)]
        return [(self.value_proj, sources), *own]

    def current_score(self) -> Score:
        one = self.key_vector.new_ones(1)
        return Additive(one, activation="leaky_relu", negative_slope=self.negative_slope)

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        assert self.edge_vector is not None
        return EdgeFeatures(features, self.edge_vector[:, None] @ self._edge_weight())
