"""Graph attention networks for node classification."""

from functools import partial
from typing import Annotated

from torch import Tensor, nn

from attnkit.core.arguments import at_least, divides
from attnkit.core.masks.edges import Edges
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.graph.block import (
    GraphActivation,
    GraphBlock,
    GraphLayer,
    Norm,
    make_activation,
    make_norm,
)
from attnkit.layers.graph.inputs import EdgeModule
from attnkit.layers.graph.receptive_field import ReceptiveField, edges_of_layers
from attnkit.models.hops import Hops


class GAT(EdgeModule):
    """Graph attention network (Veličković et al., Graph Attention Networks, 2018).

        x = elu(attention(dropout(x)))        for each layer but the last
        logits = attention(dropout(x))        whose heads are averaged

    Nodes [nodes, in_channels] in, logits [nodes, num_classes] out. By default the network of the
    paper's citation graphs with `hidden_channels=64`: two layers, 8 heads of 8 channels, one output
    head, self-loops, dropout 0.6 of every layer's input and of the attention.

    With `mlp_ratio` it is the network of Platonov et al. (A Critical Look at the Evaluation of GNNs
    under Heterophily, 2023), GAT-sep with `separate_self`, of `num_layers` residual blocks:

        x = activation(dropout(linear(x)))
        x = x + mlp(attention(norm(x)))       for each layer
        logits = linear(norm(x))

    Args:
        in_channels: channels of the nodes, or of sources and of targets, a pair, with which each
            layer has projections of its own for both; −1: those of the first input.
        hidden_channels: channels between layers, all heads together.
        num_classes: logits.
        num_layers: attention layers.
        heads: of each layer but the last, a divisor of `hidden_channels`; with residual blocks of
            each layer.
        out_heads: of the last layer; None: 1. Residual blocks have none.
        score: "gat", "gatv2", or any other score of `GraphAttention`.
        dropout_p: of the layers' inputs; with residual blocks, after the first linear layer and in
            the MLPs.
        attention_dropout_p: of the attention weights.
        value_dropout_p: of the values, after their projection, as in the code of the paper's
            authors; with 0.6 the network reaches its published accuracy on CiteSeer.
        residual: add W_r x to each layer's output, as the paper's network for protein graphs does
            in the middle; residual blocks do without.
        norm: "layer", "batch" or None: before the activation; with residual blocks as above.
        mlp_ratio: None, or residual blocks with MLPs of this width over `hidden_channels`.
        separate_self: the node's own value beside what it gathered; with residual blocks.
        add_self_loops: None: unless `separate_self`.
        edge_dim: channels of the edges, which every layer reads; None: they carry nothing.
        activation: "elu", "relu" or "gelu".
        backend: the attention kernel, as in `attnkit.attend`.

    Raises:
        ValueError: sizes that do not divide, unknown choices, options that do not go together, such
            as `heads`, `norm` or `activation` of a single layer without residual blocks.
    """

    takes_edges = True
    """Whether `edge_index` may be `attnkit.Edges`."""

    num_hops: int | None
    """How many edges away the logits of a node look, for `ReceptiveField`; None: everywhere, as
    with the statistics of batch normalization."""

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        hidden_channels: int,
        num_classes: int,
        *,
        num_layers: int = 2,
        heads: int = 8,
        out_heads: int | None = None,
        score: GraphScoreName = "gat",
        dropout_p: float = 0.6,
        attention_dropout_p: float = 0.6,
        value_dropout_p: float = 0.0,
        residual: bool = False,
        norm: Norm | None = None,
        mlp_ratio: float | None = None,
        separate_self: bool = False,
        add_self_loops: bool | None = None,
        edge_dim: int | None = None,
        activation: GraphActivation = "elu",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        at_least(1, num_layers=num_layers, heads=heads)
        unused = {"heads": (heads, 8), "norm": (norm, None), "activation": (activation, "elu")}
        if num_layers == 1 and mlp_ratio is None:
            for name, (value, default) in unused.items():
                if value != default:
                    raise ValueError(
                        f"{name}: only layers before the last have it, and num_layers is 1: "
                        f"expected {default!r}, the default, got {value!r}"
                    )
        else:
            divides("heads", heads, hidden_channels=hidden_channels)
        if mlp_ratio is None and separate_self:
            raise ValueError("separate_self: needs mlp_ratio, the MLPs that mix what is separate")
        if mlp_ratio is not None and not isinstance(in_channels, int):
            raise ValueError(f"in_channels: mlp_ratio needs one number, got {in_channels}")
        if mlp_ratio is not None and (residual or out_heads is not None):
            given = "residual" if residual else "out_heads"
            raise ValueError(f"{given}: the residual blocks of mlp_ratio have none")
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.edge_dim = edge_dim
        self.num_hops = None if norm == "batch" else num_layers
        attention = partial(
            GraphAttention,
            score=score,
            edge_dim=edge_dim,
            add_self_loops=not separate_self if add_self_loops is None else add_self_loops,
            dropout_p=attention_dropout_p,
            value_dropout_p=value_dropout_p,
            backend=backend,
        )
        head_channels = hidden_channels // heads
        self.stem, self.head = nn.Sequential(), nn.Sequential()
        if mlp_ratio is not None and isinstance(in_channels, int):
            self.stem = nn.Sequential(
                nn.Linear(in_channels, hidden_channels),
                nn.Dropout(dropout_p),
                make_activation(activation),
            )
            self.layers = nn.ModuleList(
                GraphBlock(
                    hidden_channels,
                    attention(hidden_channels, head_channels, heads, separate_self=separate_self),
                    make_norm(norm, hidden_channels),
                    mlp_ratio=mlp_ratio,
                    activation=activation,
                    dropout_p=dropout_p,
                )
                for _ in range(num_layers)
            )
            self.head = nn.Sequential(
                make_norm(norm, hidden_channels), nn.Linear(hidden_channels, num_classes)
            )
            return
        is_pair = not isinstance(in_channels, int)
        inner = (hidden_channels, hidden_channels) if is_pair else hidden_channels
        sizes = [in_channels, *[inner] * (num_layers - 1)]
        hidden = [
            GraphLayer(
                attention(size, head_channels, heads, residual=residual),
                make_norm(norm, hidden_channels),
                make_activation(activation),
                dropout_p,
            )
            for size in sizes[:-1]
        ]
        last = attention(sizes[-1], num_classes, out_heads or 1, concat=False, residual=residual)
        self.layers = nn.ModuleList(
            [*hidden, GraphLayer(last, nn.Identity(), nn.Identity(), dropout_p)]
        )

    def forward(
        self,
        x: Annotated[Tensor, "nodes channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | Edges | ReceptiveField,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | None = None,
    ) -> Annotated[Tensor, "nodes classes"]:
        """Logits of the nodes, or of those that a receptive field is of.

        Args:
            x: dense or sparse CSR, of which the values are dropped.
            edge_index: as in `GraphAttention`; or a receptive field.
        """
        hops = edges_of_layers(edge_index, edge_attr, x.shape[0], len(self.layers), self.edge_dim)
        x = self.stem(x)
        for layer, (edges, features) in zip(self.layers, hops, strict=True):
            x = layer(x, edges, features)
        return self.head(x)

    @property
    def hops(self) -> Hops:
        """The network layer by layer, for a graph that is computed in parts."""
        return Hops(self.stem, list(self.layers), self.head)
