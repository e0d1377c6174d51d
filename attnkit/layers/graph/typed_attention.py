"""Base classes of attention over typed edges, and linear layers by node type."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attnkit.core.arguments import at_least, choice, divides, share
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.kernels.edges.weights import edge_weights
from attnkit.core.masks.edges import EdgeFeatures
from attnkit.core.multihead import reset_linear
from attnkit.core.operators.sparse import products_of
from attnkit.core.scores.kinds import Score
from attnkit.core.weights import Indices, of_edges
from attnkit.layers.graph.typed_edges import (
    AttentionMechanism,
    EdgesByType,
    Metadata,
    NodesByType,
    TypedEdges,
    as_metadata,
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

    in_channels: channels of the nodes, one number or one for each type; −1: taken from the first
        input.
    out_channels: channels of the output, a multiple of `heads`.
    metadata: node types and edge types.
    width: number of channels that a node is projected to.
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
