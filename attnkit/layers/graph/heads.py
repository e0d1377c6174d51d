"""Projections of node features to heads of queries, keys and values, for each graph score.

`QueryKeyValueHeads` projects all three, as a Transformer does. In `GATv2Heads` the keys are the
values. In `GATHeads` queries and keys have one channel, since GAT's score is a sum of two numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnkit.core.masks.edges import EdgeFeatures
from attnkit.core.multihead import Projections, matrix_of, reset_linear
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import Score
from attnkit.core.scores.learned import AdditiveScore, learned_score


class NodeHeads(NamedTuple):
    """Query [heads, targets, head_dim], key [heads, sources, head_dim] and value [heads, sources,
    out_channels] of nodes; those of a batch have its dimension first."""

    query: Tensor
    key: Tensor
    value: Tensor


def first_nodes(heads: Tensor, count: int) -> Tensor:
    """Return the first `count` nodes of heads [heads, nodes, channels].

    If these are all nodes, it returns the tensor itself: the backward of a slice would copy the
    gradient into a new tensor of zeros.
    """
    return heads if heads.shape[-2] == count else heads[..., :count, :]


def each_at_its_head(vectors: Tensor) -> Tensor:
    """Return vectors [..., heads, channels] as rows [..., heads, heads · channels], which are 0
    outside the channels of their own head."""
    eye = torch.eye(vectors.shape[-2], dtype=vectors.dtype, device=vectors.device)
    return (vectors[..., None, :] * eye[..., None]).flatten(-2)


class GraphHeads(nn.Module):
    """The base class of the projections to heads.

    in_channels: channels of sources and of targets. edge_dim: channels of the edge features, whose
    projection `edge_proj` has no bias; None: edges have no features.
    """

    def __init__(
        self, in_channels: tuple[int, int], out_channels: int, heads: int, edge_dim: int | None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.edge_proj = None
        if edge_dim is not None:
            self.edge_proj = nn.Linear(edge_dim, heads * out_channels, bias=False)

    def forward(self, source: Tensor, target: Tensor, *, is_one: bool = False) -> NodeHeads:
        """Return the heads of nodes [nodes, channels].

        is_one: the targets are the first of the sources, or all of them.
        """
        raise NotImplementedError

    def own(self, nodes: Tensor) -> Tensor:
        """Return the nodes' values, [heads, nodes, out_channels]."""
        raise NotImplementedError

    def current_score(self) -> Score:
        """Return the score with the current parameters."""
        raise NotImplementedError

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        """Return what edges with features [edges, edge_dim] add to keys and values."""
        raise NotImplementedError

    def readers(self, sources: int, targets: int) -> list[tuple[nn.Linear, int]]:
        """Return the layers that read node features, each with its number of input channels."""
        of_targets = "query_proj", "target_proj"
        return [
            (module, targets if name.endswith(of_targets) else sources)
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith(("edge_proj", "score"))
        ]

    def reset_parameters(self) -> None:
        """Set matrices Xavier-uniform, biases to 0, and reset the score."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                reset_linear(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def _split(self, projected: Tensor) -> Tensor:
        """Return [nodes, heads · channels] as [heads, nodes, channels]."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def _edge_weight(self, features: Tensor) -> Tensor:
        """Return the edge projection split into heads, [heads, out_channels, edge_dim], which
        kernels apply to one edge after the other."""
        assert self.edge_proj is not None
        return self._split(matrix_of(self.edge_proj, features)).mT


class QueryKeyValueHeads(GraphHeads):
    """Separate projections to queries, keys and values, for any score of queries and keys.

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
        self.node_proj = Projections(
            in_channels[1],
            heads,
            head_dim=out_channels,
            # key_dim keeps three layers, even if sources are targets: with one larger product a
            # step takes 3 to 5 % longer, as autograd copies the gradients of its parts together
            key_dim=in_channels[0],
            bias=bias,
        )
        self.score = learned_score(score, heads, out_channels)
        self.reset_parameters()

    def forward(self, source: Tensor, target: Tensor, *, is_one: bool = False) -> NodeHeads:
        return NodeHeads(*self.node_proj.project(target, source, source))

    def own(self, nodes: Tensor) -> Tensor:
        return self._split(self.node_proj.value_proj(nodes))

    def current_score(self) -> Score:
        return self.score() if isinstance(self.score, nn.Module) else self.score

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        weight = self._edge_weight(features)
        return EdgeFeatures(features, key_weight=weight, value_weight=weight)


class GATv2Heads(GraphHeads):
    """Projections for the score vᵀ LeakyReLU(q + k + W_e e), whose values are its keys (Brody et
    al. 2022).

    share_weights: the projection of the keys gives the queries too.
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

    def forward(self, source: Tensor, target: Tensor, *, is_one: bool = False) -> NodeHeads:
        key = self.own(source)
        if self.query_proj is not None:
            query = self._split(self.query_proj(target))
        else:
            query = first_nodes(key, target.shape[-2]) if is_one else self.own(target)
        return NodeHeads(query, key, key)

    def own(self, nodes: Tensor) -> Tensor:
        return self._split(self.key_proj(nodes))

    def current_score(self) -> Score:
        return self.score()

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        return EdgeFeatures(features, key_weight=self._edge_weight(features))


class GATHeads(GraphHeads):
    """Projections for the score LeakyReLU(a_t·W x_i + a_s·W x_j + a_e·W_e e) (Veličković et al.
    2018), an additive score with queries a_t·W x_i and keys a_s·W x_j of one channel.

    is_bipartite: targets have a projection of their own, which only the scores read.
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
        self.current_score()  # raises for a wrong slope at construction

    def reset_parameters(self) -> None:
        """Set weights Xavier-uniform, a vector as a projection to one number, and biases to 0."""
        super().reset_parameters()
        bound = (6 / (self.key_vector.shape[1] + 1)) ** 0.5
        for vector in (self.query_vector, self.key_vector, self.edge_vector):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)

    def forward(self, source: Tensor, target: Tensor, *, is_one: bool = False) -> NodeHeads:
        projected = self.value_proj(source)
        value = self._split(projected)
        if is_one and self.target_proj is None:
            query, key = self._times(projected, self.query_vector, self.key_vector)
            return NodeHeads(first_nodes(query, target.shape[-2]), key, value)
        (key,) = self._times(projected, self.key_vector)
        if not target.shape[-1]:  # they add nothing to the scores
            query = key.new_zeros(*key.shape[:-2], target.shape[-2], 1)
        else:
            own = self.value_proj if self.target_proj is None else self.target_proj
            (query,) = self._times(own(target), self.query_vector)
        return NodeHeads(query, key, value)

    def _times(self, projected: Tensor, *vectors: Tensor) -> list[Tensor]:
        """Multiply each head of nodes [nodes, heads · channels] with its row of each vector
        [heads, channels]; return [heads, nodes, 1] for each vector.

        This is one matrix product for all heads and vectors, with zeros outside a head's channels:
        one product for each head takes two to three times as long. If a head's values are not
        finite, the scores of all heads are NaN, because 0 · ∞ is NaN.
        """
        matrix = each_at_its_head(torch.stack(vectors)).flatten(0, 1)
        scores = matrix @ projected.mT  # the scores of a head are contiguous, as kernels read them
        return [part[..., None] for part in scores.split(self.heads, dim=-2)]

    def own(self, nodes: Tensor) -> Tensor:
        return self._split(self.value_proj(nodes))

    def current_score(self) -> Score:
        one = self.key_vector.new_ones(1)
        return Additive(one, activation="leaky_relu", negative_slope=self.negative_slope)

    def edge_features(self, features: Tensor) -> EdgeFeatures:
        assert self.edge_vector is not None
        weight = self.edge_vector[:, None] @ self._edge_weight(features)
        return EdgeFeatures(features, weight)
