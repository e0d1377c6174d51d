"""Attention of the Heterogeneous Graph Attention Network."""

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.multihead import reset_linear
from attnkit.core.scores.additive import Additive
from attnkit.layers.graph.heads import each_at_its_head
from attnkit.layers.graph.typed_attention import Heads, TypedNodeAttention
from attnkit.layers.graph.typed_edges import (
    EdgesByType,
    Metadata,
    NodesByType,
    TypedEdges,
    as_typed_edges,
    split_heads,
)


class HANAttention(TypedNodeAttention):
    """Attention of nodes, then of edge types (Wang et al., Heterogeneous Graph Attention Network,
    2019).

        h_i = W_t(i) x_i + b_t(i)
        z_i,r = relu(Σ_e weight_e · h_j),   weight_e = softmax_e(LeakyReLU(a_r · h_j + a′_r · h_i))
        output_i = Σ_r softmax_r(mean_i(q · tanh(W z_i,r + b))) · z_i,r

    where t is the type of a node, and e runs over the edges of type r into i: an edge type stands
    for a meta-path. The mean runs over all given nodes, so the graphs of a batch count as one
    graph, as in PyG. The node-level attention of all edge types is one call of the edge kernels.
    Equal to PyG's `HANConv`, which `interop.from_pyg` converts and which has relu where the paper
    has elu.

    Args:
        in_channels: channels of the nodes, one number or one for each type; −1: taken from the
            first input.
        out_channels: channels of the output, a multiple of `heads`.
        metadata: node types and edge types, as `data.metadata()` or a JSON file gives them.
        heads: number of heads of the node-level attention.
        negative_slope: slope of the LeakyReLU.
        dropout_p, backend: as in `MultiHeadAttention`.

    Raises:
        ValueError: sizes that do not divide, types that do not fit.
    """

    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        metadata: Metadata,
        heads: int = 1,
        *,
        negative_slope: float = 0.2,
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            metadata,
            heads,
            width=out_channels,
            attention_mechanism="within-relation",
            dropout_p=dropout_p,
            backend=backend,
        )
        self.negative_slope = negative_slope
        vectors = len(self.metadata[1]), heads, out_channels // heads
        self.key_vector = nn.Parameter(torch.empty(vectors))
        self.query_vector = nn.Parameter(torch.empty(vectors))
        self.type_proj = nn.Linear(out_channels, out_channels)
        self.type_query = nn.Parameter(torch.empty(out_channels))
        self.reset_parameters()
        self._score()  # raises for a wrong slope at construction

    def reset_parameters(self) -> None:
        """Set weights Xavier-uniform, a vector as a projection to one number, and biases to 0."""
        self.in_proj.reset_parameters()
        reset_linear(self.type_proj)
        for vector in (self.key_vector, self.query_vector, self.type_query):
            bound = (6 / (vector.shape[-1] + 1)) ** 0.5
            nn.init.uniform_(vector, -bound, bound)

    def forward(
        self,
        x_dict: NodesByType,
        edge_index_dict: EdgesByType | TypedEdges,
        return_semantic_attention_weights: bool = False,
    ) -> dict[str, Annotated[Tensor, "_ out_channels"] | None]:
        """Compute what nodes gather from their neighbours of all types.

        Args:
            x_dict: nodes [nodes, channels] by type.
            edge_index_dict: edges by edge type, each as in `GraphAttention`, sorted once in the
                same way; or `TypedEdges`.
            return_semantic_attention_weights: return the weights of edge types too, as PyG does.

        Returns:
            Nodes [nodes, out_channels] by node type, None for a type that no edge type leads to.
            With `return_semantic_attention_weights` a pair of that and of the weights of the edge
            types into each node type, in the order of `edge_index_dict`.

        Raises:
            ValueError, TypeError, IndexError: nodes or edges of another shape or type.
        """
        given = self._heads(x_dict, edge_index_dict)
        edges, rows = given.edges, self._attend(given).transpose(0, 1).flatten(1).relu()
        pairs = edges.targets
        by_target: dict[str, list[Tensor]] = {name: [] for name in x_dict}
        parts = (tensor.split(pairs.counts) for tensor in (rows, pairs.node))
        for (_, _, target), part, nodes in zip(edges.edge_types, *parts, strict=True):
            if len(nodes) < len(x_dict[target]):
                all_nodes = part.new_zeros(len(x_dict[target]), self.out_channels)
                part = all_nodes.index_copy(0, nodes - edges.nodes[target].start, part)
            by_target[target].append(part)
        outputs: dict[str, Tensor | None] = {}
        weights: dict[str, Tensor | None] = {}
        for name, of_types in by_target.items():
            outputs[name], weights[name] = self._over_types(of_types)
        if return_semantic_attention_weights:
            return outputs, weights  # type: ignore[return-value]
        return outputs

    def _over_types(self, of_types: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the weighted mean of the edge types' outputs, and the weights."""
        if not of_types:
            return None, None
        stacked = torch.stack(of_types)
        if stacked.shape[1] == 0:
            return stacked[0], None
        scores = self.type_proj(stacked).tanh().mean(dim=1) @ self.type_query
        weights = scores.softmax(dim=0)
        return torch.tensordot(weights, stacked, dims=1), weights

    def _score(self) -> Additive:
        return Additive(self.key_vector.new_ones(1), "leaky_relu", self.negative_slope)

    def _heads(self, x_dict: NodesByType, edge_index_dict: EdgesByType | TypedEdges) -> Heads:
        """Return heads whose queries and keys have one channel, for the additive score."""
        edges, types = as_typed_edges(edge_index_dict, x_dict, self.metadata)
        projected = self.in_proj(x_dict)
        nodes = torch.cat([projected[name] for name in edges.nodes])
        # one matrix product for the vectors of all types and heads; each reads its own head
        vectors = torch.stack([self.query_vector[types], self.key_vector[types]])
        matrix = each_at_its_head(vectors).flatten(0, 2)
        scores = (nodes @ matrix.mT).view(-1, self.heads)
        places = [
            (2 * pairs.node + end) * len(types) + pairs.type
            for end, pairs in enumerate((edges.targets, edges.sources))
        ]
        query, key = (split_heads(scores.index_select(0, place), self.heads) for place in places)
        value = split_heads(nodes.index_select(0, edges.sources.node), self.heads)
        return Heads(edges, query, key, value)
