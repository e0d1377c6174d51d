"""Attention between nodes of several types along edges of several types: HGT and HAN."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from attnkit.core.arguments import at_least, choice, divides, share
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.kernels.edges.edges import edge_weights
from attnkit.core.masks.edges import EdgeFeatures
from attnkit.core.multihead import reset_linear
from attnkit.core.operators.sparse import products_of
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import Score
from attnkit.core.weights import Indices, of_edges
from attnkit.layers.graph.heads import each_at_its_head
from attnkit.layers.graph.typed_edges import (
    AttentionMechanism,
    EdgesByType,
    Metadata,
    NodesByType,
    TypedEdges,
    as_metadata,
    as_typed_edges,
    split_heads,
)


class Heads(NamedTuple):
    """The inputs of attention over typed edges.

    query: [heads, targets, head_dim]; a target is a node, or a pair of an edge type and a node.
    key, value: [heads, sources, head_dim]; a source is such a pair.
    """

    edges: TypedEdges
    query: Tensor
    key: Tensor
    value: Tensor
    features: EdgeFeatures | None = None


class TypedAttention(nn.Module):
    """Attention over edges of several types, computed from `Heads` in one call.

    heads: number of heads.
    attention_mechanism: "across-relation" or "within-relation".
    dropout_p, backend: as in `MultiHeadAttention`.
    """

    def __init__(
        self, heads: int, attention_mechanism: AttentionMechanism, dropout_p: float, backend: str
    ) -> None:
        super().__init__()
        at_least(1, heads=heads)
        choice(get_args(AttentionMechanism), attention_mechanism=attention_mechanism)
        share(dropout_p=dropout_p)
        named_backend(backend)
        self.heads = heads
        self.attention_mechanism: AttentionMechanism = attention_mechanism
        self.dropout_p = dropout_p
        self.backend = backend

    def _score(self) -> str | Score:
        return "scaled_dot"

    def _attend(self, given: Heads) -> Tensor:
        """Return the output of the targets, [heads, targets, channels]."""
        return attend(
            given.query,
            given.key,
            given.value,
            score=self._score(),
            mask=given.edges.mask(self.attention_mechanism),
            edge_features=given.features,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )

    def _weights(self, given: Heads) -> Tensor:
        """Return the weights that `_attend` uses, before dropout, [edges, heads]."""
        edges = given.edges.mask(self.attention_mechanism)
        return edge_weights(
            given.query, given.key, edges, score=self._score(), edge_features=given.features
        ).T


class TypedNodeAttention(TypedAttention):
    """Attention over typed edges between typed nodes; each node type has a projection of its own.

    width: number of channels that a node is projected to. The others are those of `HGTAttention`.
    """

    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        metadata: Metadata,
        heads: int,
        *,
        width: int,
        attention_mechanism: AttentionMechanism,
        dropout_p: float,
        backend: str,
    ) -> None:
        super().__init__(heads, attention_mechanism, dropout_p, backend)
        at_least(1, out_channels=out_channels)
        divides("heads", heads, out_channels=out_channels)
        self.metadata = as_metadata(metadata)
        self.out_channels = out_channels
        self.in_proj = TypedLinear(channels_by_type(in_channels, self.metadata[0]), width)

    def attention_weights(
        self,
        x_dict: NodesByType,
        edge_index_dict: EdgesByType | TypedEdges,
        *,
        rows: Indices = None,
        heads: Indices = None,
    ) -> Annotated[Tensor, "rows chosen_heads"]:
        """Return the weights of edges that `forward` uses on the same arguments, before dropout.

        Args:
            rows: which edges, None for all.
            heads: which heads, None for all.

        Returns:
            One row for each edge, ordered by edge type; `TypedEdges.by_type` splits them.
        """
        return of_edges(self._weights(self._heads(x_dict, edge_index_dict)), rows, heads)

    def _heads(self, x_dict: NodesByType, edge_index_dict: EdgesByType | TypedEdges) -> Heads:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.out_channels}, heads={self.heads})"


def channels_by_type(in_channels: int | Mapping[str, int], node_types: list[str]) -> dict[str, int]:
    """Return the channels of each node type, from one number for all or a dict."""
    if isinstance(in_channels, int):
        return dict.fromkeys(node_types, in_channels)
    if set(in_channels) != set(node_types):
        raise ValueError(
            f"in_channels: expected a number for each of {', '.join(map(repr, node_types))}, "
            f"got {dict(in_channels)}"
        )
    return {name: in_channels[name] for name in node_types}


class TypedLinear(nn.Module):
    """y_i = W_t x_i + b_t for a node i of type t.

    in_channels: channels by node type; −1: taken from the type's first input.
    """

    def __init__(self, in_channels: dict[str, int], out_channels: int) -> None:
        super().__init__()
        known = [size for size in in_channels.values() if size != -1]
        at_least(1, in_channels=min(known, default=1), out_channels=out_channels)
        self.types = [*in_channels]
        layers = [nn.Linear(max(size, 1), out_channels) for size in in_channels.values()]
        for layer, size in zip(layers, in_channels.values(), strict=True):
            if size == -1:
                layer.weight = nn.UninitializedParameter()
        self.layers = nn.ModuleList(layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set matrices Xavier-uniform and biases to 0."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear) and not is_lazy(layer.weight):
                reset_linear(layer)

    def forward(self, x_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Project nodes [nodes, channels] by type; types may be missing."""
        outputs = {}
        for name, layer in zip(self.types, self.layers, strict=True):
            if name not in x_dict:
                continue
            channels = x_dict[name].shape[1]
            if isinstance(layer, nn.Linear) and is_lazy(layer.weight):
                layer.weight.materialize((layer.out_features, channels))
                layer.in_features = channels
                reset_linear(layer)
            expected = getattr(layer, "in_features", channels)  # a wrapper may not have it
            if channels != expected:
                raise ValueError(
                    f"x_dict: expected [nodes, {expected}] of {name!r}, "
                    f"got {list(x_dict[name].shape)}"
                )
            with products_of(x_dict[name]):
                outputs[name] = layer(x_dict[name])
        return outputs


class HGTAttention(TypedNodeAttention):
    """Attention over edges of several types (Hu et al., Heterogeneous Graph Transformer, 2020).

        head_h,i = Σ_e weight_h,e · (W_v,h,t(j) x_j) M_h,r        over the edges e of type r
        weight_h,e = softmax_e(p_h,r · (W_q,h,t(i) x_i) · (W_k,h,t(j) x_j) A_h,r / √head_dim)
        output_i = s · (W_o,t(i) gelu([head_1,i … head_H,i]) + b) + (1 − s) · x_i

    where t is the type of a node, and s = sigmoid(skip_t(i)); s and x_i are left out for nodes
    whose channels are not `out_channels`. The softmax runs over the edges of all types into a node,
    in one call of the edge kernels. The paper adds x_i without a factor; s is in the authors' code
    and in PyG's `HGTConv`, which `interop.from_pyg` converts.

    Args:
        in_channels: channels of the nodes, one number or one for each type; −1: taken from the
            first input.
        out_channels: channels of the output, a multiple of `heads`.
        metadata: node types and edge types, as `data.metadata()` or a JSON file gives them.
        heads: number of heads.
        attention_mechanism: "across-relation", one softmax over all edge types; or
            "within-relation", a softmax for each edge type and the sum of their outputs.
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
        attention_mechanism: AttentionMechanism = "across-relation",
        dropout_p: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            metadata,
            heads,
            width=3 * out_channels,
            attention_mechanism=attention_mechanism,
            dropout_p=dropout_p,
            backend=backend,
        )
        node_types, edge_types = self.metadata
        self.out_proj = TypedLinear(dict.fromkeys(node_types, out_channels), out_channels)
        dim = out_channels // heads
        self.key_weight = nn.Parameter(torch.empty(len(edge_types), heads, dim, dim))
        self.value_weight = nn.Parameter(torch.empty(len(edge_types), heads, dim, dim))
        self.prior = nn.Parameter(torch.empty(len(edge_types), heads))
        self.skip = nn.Parameter(torch.empty(len(node_types)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set matrices Xavier-uniform, biases to 0, priors and skips to 1."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        for weight in (self.key_weight, self.value_weight):
            bound = (3 / weight.shape[-1]) ** 0.5
            nn.init.uniform_(weight, -bound, bound)
        nn.init.ones_(self.prior)
        nn.init.ones_(self.skip)

    def forward(
        self,
        x_dict: NodesByType,
        edge_index_dict: EdgesByType | TypedEdges,
    ) -> dict[str, Annotated[Tensor, "_ out_channels"]]:
        """Compute what nodes gather from their neighbours of all types.

        Args:
            x_dict: nodes [nodes, channels] by type.
            edge_index_dict: edges by edge type, each as in `GraphAttention`, sorted once in the
                same way; or `TypedEdges`.

        Returns:
            Nodes [nodes, out_channels] of each type that an edge type of the metadata leads to.

        Raises:
            ValueError, TypeError, IndexError: nodes or edges of another shape or type.
        """
        given = self._heads(x_dict, edge_index_dict)
        edges, output = given.edges, self._attend(given)
        gathered = F.gelu(edges.summed(output, self.attention_mechanism).transpose(0, 1).flatten(1))
        targets = {key[2] for key in self.metadata[1]}
        parts = {name: gathered[rows] for name, rows in edges.nodes.items() if name in targets}
        outputs = self.out_proj(parts)
        for name, output in outputs.items():
            if x_dict[name].shape[1] == self.out_channels:
                weight = self.skip[self.metadata[0].index(name)].sigmoid()
                outputs[name] = weight * output + (1 - weight) * x_dict[name]
        return outputs

    def _heads(self, x_dict: NodesByType, edge_index_dict: EdgesByType | TypedEdges) -> Heads:
        edges, types = as_typed_edges(edge_index_dict, x_dict, self.metadata)
        sizes = [self.out_channels, 2 * self.out_channels]
        nodes = {name: rows.split(sizes, dim=1) for name, rows in self.in_proj(x_dict).items()}
        query = torch.cat([nodes[name][0] for name in edges.nodes])
        if self.attention_mechanism == "within-relation":
            query = query.index_select(0, edges.targets.node)
        # keys and values as twice as many heads, each with the matrix of its edge type
        weight = torch.cat([self.key_weight * self.prior[..., None, None], self.value_weight], 1)
        parts = [
            split_heads(edges.of_sources(key, nodes[key[0]][1]), 2 * self.heads) @ weight[place]
            for key, place in zip(edges.edge_types, types, strict=True)
        ]
        key, value = torch.cat(parts, dim=1).split(self.heads)
        return Heads(edges, split_heads(query, self.heads), key, value)


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
        in_channels, out_channels, metadata, dropout_p, backend: as in `HGTAttention`.
        heads: number of heads of the node-level attention.
        negative_slope: slope of the LeakyReLU.

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
            x_dict, edge_index_dict: as in `HGTAttention`.
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
