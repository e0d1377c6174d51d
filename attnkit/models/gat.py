"""Graph attention networks."""

from functools import partial
from typing import Annotated

from torch import Tensor, nn

from attnkit.core.arguments import at_least, divides, up_to_1
from attnkit.core.masks.edges import Edges
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.graph.blocks import (
    GraphActivation,
    GraphBlock,
    GraphLayer,
    Norm,
    SparseDropout,
    SparseLinear,
    make_activation,
    make_norm,
)
from attnkit.layers.graph.receptive_field import ReceptiveField, edges_of_layers
from attnkit.models.graph_model import GraphModel, Hops, Pool, ReadOut


class GAT(GraphModel):
    """Graph attention network (Veličković et al., Graph Attention Networks, 2018).

        x = elu(attention(dropout(x)))        for each layer but the last
        logits = attention(dropout(x))        whose heads are averaged

    Nodes [nodes, in_channels] in, logits [nodes, num_classes] out, or logits of graphs or of pairs
    of nodes, by the readout. The defaults with `hidden_channels=64` give the paper's network for
    citation graphs: two layers, 8 heads of 8 channels, one output head, self-loops, dropout 0.6 of
    every layer's input and of the attention.

    With `residual`, `norm` and `last_linear`, and on some graphs `first_linear`, it is the network
    of Luo et al. (Classic GNNs are Strong Baselines, 2024), who use one head, relu, no dropout of
    the attention and `input_dropout_p=0`:

        x = linear(x)                                 with first_linear
        x = dropout(x)                                for each layer
        x = activation(norm(attention(x) + W_r x))
        logits = linear(dropout(x))

    W_r is initialized Kaiming-uniform there and Xavier-uniform here.

    With `mlp_ratio` it is the network of Platonov et al. (A Critical Look at the Evaluation of GNNs
    under Heterophily, 2023), GAT-sep with `separate_self`, of `num_layers` residual blocks:

        x = activation(dropout(linear(x)))
        x = x + mlp(attention(norm(x)))       for each layer
        logits = linear(norm(x))

    Args:
        in_channels: channels of the nodes, or a pair, channels of sources and of targets, for which
            each layer then has separate projections; −1: inferred from the first input.
        hidden_channels: channels between layers, all heads together.
        num_classes: number of logits.
        num_layers: number of attention layers.
        heads: heads of each layer but the last, a divisor of `hidden_channels`; with `last_linear`
            or residual blocks, of each layer.
        out_heads: heads of the last layer, which gives the logits; None: 1. With `last_linear` or
            residual blocks there is no such layer.
        score: "gat", "gatv2", or any other score of `GraphAttention`.
        dropout_p: dropout of the layers' inputs; with residual blocks, after the first linear layer
            and in the MLPs.
        input_dropout_p: dropout of the input x; None: `dropout_p`. Residual blocks do not drop x.
        attention_dropout_p: dropout of the attention weights.
        value_dropout_p: dropout of the values after their projection, as in the code of the paper's
            authors; with 0.6 the network reaches its published accuracy on CiteSeer.
        residual: whether to add W_r x to each layer's output, as the paper's network for protein
            graphs does in its middle layer; not for residual blocks.
        norm: "layer", "batch" or None: the norm before the activation of each layer but the last,
            or of each layer with `last_linear`; with residual blocks as above.
        first_linear: whether a linear layer precedes the first attention.
        last_linear: whether a linear layer gives the logits, after attention layers that are all
            alike; always true with a readout other than "node".
        readout, pool: what the last linear layer reads, as in `GraphTransformer`.
        mlp_ratio: None, or residual blocks with MLPs of this width over `hidden_channels`.
        separate_self: whether the MLPs read the node's own value beside the gathered one; needs
            `mlp_ratio`.
        add_self_loops: whether each node sees itself; None: unless `separate_self`.
        edge_dim: channels of the edge features, which every layer reads; None: no edge features.
        activation: "elu", "relu" or "gelu".
        backend: the attention kernel, as in `attnkit.attend`.

    Raises:
        ValueError: sizes that do not divide, unknown choices, or options that exclude each other,
            such as `heads`, `norm` or `activation` of a single layer without residual blocks.
    """

    num_hops: int | None
    """The distance in edges up to which nodes affect the logits of a node, for `ReceptiveField`.
    None: all nodes do, as with the statistics of batch normalization, or no logits of nodes."""

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
        input_dropout_p: float | None = None,
        residual: bool = False,
        norm: Norm | None = None,
        first_linear: bool = False,
        last_linear: bool = False,
        readout: ReadOut = "node",
        pool: Pool = "attention",
        mlp_ratio: float | None = None,
        separate_self: bool = False,
        add_self_loops: bool | None = None,
        edge_dim: int | None = None,
        activation: GraphActivation = "elu",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        at_least(1, num_layers=num_layers, heads=heads)
        cause = "last_linear" if last_linear else f"readout={readout!r}"
        last_linear = last_linear or (readout != "node" and mlp_ratio is None)
        up_to_1(dropout_p=dropout_p, input_dropout_p=input_dropout_p)
        if num_layers > 1 or last_linear or mlp_ratio is not None:
            divides("heads", heads, hidden_channels=hidden_channels)
        else:
            unused = {"heads": (heads, 8), "norm": (norm, None), "activation": (activation, "elu")}
            for name, (value, default) in unused.items():
                if value != default:
                    raise ValueError(
                        f"{name}: only layers before the last have it, and num_layers is 1: "
                        f"expected {default!r}, the default, got {value!r}"
                    )
        if mlp_ratio is None and separate_self:
            raise ValueError("separate_self: needs mlp_ratio, the MLPs that mix what is separate")
        of_layers = {
            "out_heads": out_heads,
            "residual": residual or None,
            "first_linear": first_linear or None,
            "last_linear": last_linear or None,
            "input_dropout_p": input_dropout_p,
        }
        for name, given in of_layers.items():
            if mlp_ratio is not None and given is not None:
                raise ValueError(
                    f"{name}: the residual blocks of mlp_ratio do not have it: leave it out, "
                    f"got {given}"
                )
        if last_linear and out_heads is not None:
            raise ValueError(
                f"out_heads: with {cause} a linear layer gives the logits, there are no heads of "
                f"the last layer to average: expected None, got {out_heads}"
            )
        first = None
        if first_linear or mlp_ratio is not None:
            if not isinstance(in_channels, int):
                name = "first_linear" if first_linear else "mlp_ratio"
                raise ValueError(f"in_channels: {name} needs one number, got {in_channels}")
            at_least(1, in_channels=in_channels)
            first = SparseLinear(in_channels, hidden_channels)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.edge_dim = edge_dim
        self.num_hops = None if norm == "batch" or readout != "node" else num_layers
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
        if mlp_ratio is not None and first is not None:
            self.stem = nn.Sequential(first, nn.Dropout(dropout_p), make_activation(activation))
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
            width = self._reads(readout, pool, hidden_channels, heads, backend)
            self.head = nn.Sequential(
                make_norm(norm, hidden_channels), nn.Linear(width, num_classes)
            )
            return
        inner = hidden_channels if isinstance(in_channels, int) else (hidden_channels,) * 2
        sizes = [in_channels, *[inner] * (num_layers - 1)]
        drops = [dropout_p if input_dropout_p is None else input_dropout_p]
        drops += [dropout_p] * (num_layers - 1)
        if first is not None:
            self.stem = nn.Sequential(SparseDropout(drops[0]), first)
            sizes[0], drops[0] = inner, dropout_p
        num_hidden = num_layers if last_linear else num_layers - 1
        layers = [
            GraphLayer(
                attention(size, head_channels, heads, residual=residual),
                make_norm(norm, hidden_channels),
                make_activation(activation),
                drop,
            )
            for size, drop in zip(sizes[:num_hidden], drops, strict=False)
        ]
        width = self._reads(readout, pool, hidden_channels, heads, backend)
        if last_linear:
            self.head = nn.Sequential(nn.Dropout(dropout_p), nn.Linear(width, num_classes))
        else:
            last = attention(
                sizes[-1], num_classes, out_heads or 1, concat=False, residual=residual
            )
            layers.append(GraphLayer(last, nn.Identity(), nn.Identity(), drops[-1]))
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        x: Annotated[Tensor, "nodes channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | Edges | ReceptiveField,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | None = None,
        *,
        batch: Annotated[Tensor, "nodes", int] | None = None,
        num_graphs: int | None = None,
        pairs: Annotated[Tensor, "2 pairs", int] | None = None,
    ) -> Annotated[Tensor, "rows classes"]:
        """Return logits of nodes, graphs or pairs, by the readout; with a receptive field, of its
        target nodes.

        Args:
            x: dense, or sparse CSR, whose stored values dropout then drops.
            edge_index: as in `GraphAttention`; or, with the readout "node", a receptive field.
            batch, num_graphs, pairs: as in `GraphTransformer`.
        """
        lengths = self._sizes_of_graphs(x, edge_index, batch, num_graphs, pairs)
        hops = edges_of_layers(edge_index, edge_attr, x.shape[0], len(self.layers), self.edge_dim)
        is_wrong = isinstance(x, Tensor) and x.shape[-1] != self.in_channels
        if len(self.stem) and is_wrong:  # checked before dropout draws
            raise ValueError(f"x: expected [nodes, {self.in_channels}], got {list(x.shape)}")
        x = self.stem(x)
        for layer, (edges, features) in zip(self.layers, hops, strict=True):
            x = layer(x, edges, features)
        if self.readout == "node":
            return self.head(x)
        *before, last = self.head
        for module in before:
            x = module(x)
        return last(self._read(x, lengths, pairs))

    @property
    def hops(self) -> Hops | None:
        """The network layer by layer, for a graph that is computed in parts; None with a readout
        other than "node"."""
        if self.readout != "node":
            return None
        return Hops(self.stem, list(self.layers), self.head)
