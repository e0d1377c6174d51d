"""A graph transformer: local attention along edges and global attention in each graph."""

from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.sequences import Packed
from attnkit.layers.graph.attention import GraphScoreName
from attnkit.layers.graph.receptive_field import ReceptiveField, edges_of_layers
from attnkit.layers.graph.sparse import SparseLinear
from attnkit.layers.graph.transformer_block import (
    GlobalAttention,
    GraphPool,
    GraphTransformerBlock,
    graph_lengths,
)
from attnkit.layers.tokens.block import Activation

ReadOut = Literal["node", "graph", "edge"]


class GraphTransformer(nn.Module):
    """Graph transformer of pre-norm blocks (Rampášek et al., GraphGPS, 2022; with local attention
    alone, Dwivedi and Bresson 2021).

        x = linear(x) + linear(positions)
        x = block(x, edges)         num_layers times
        logits = linear(norm(x))    of nodes, of pooled graphs, or of pairs [x_i, x_j]

    Args:
        in_channels: channels of the nodes.
        hidden_channels: channels between blocks.
        num_classes: logits.
        num_layers, heads: of the blocks.
        local: the score along edges, as in `GraphAttention`; None: no local attention.
        global_attention: "softmax", "linear" for large graphs, or None.
        readout: "node", "graph", pooled by attention with one learned query, or "edge".
        position_dim: channels of positional encodings, such as those of PyG's transforms
            `AddRandomWalkPE` and `AddLaplacianEigenvectorPE`; None: there are none.
        random_signs: flip the sign of each column of the positions at random in training, as is
            right for eigenvectors, whose sign means nothing.
        edge_dim: channels of the edges, which local attention reads.
        mlp_ratio, dropout_p, attention_dropout_p, activation, backend: of the blocks.

    Raises:
        ValueError: sizes that do not divide, unknown choices, arguments that are missing.
    """

    takes_edges = True
    """Whether `edge_index` may be `attnkit.Edges`."""

    num_hops: int | None
    """How many edges away the logits of a node look; None: to every node."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_classes: int,
        *,
        num_layers: int = 4,
        heads: int = 8,
        local: GraphScoreName | None = "scaled_dot",
        global_attention: GlobalAttention | None = "softmax",
        readout: ReadOut = "node",
        position_dim: int | None = None,
        random_signs: bool = False,
        edge_dim: int | None = None,
        mlp_ratio: float = 2.0,
        dropout_p: float = 0.2,
        attention_dropout_p: float = 0.0,
        activation: Activation = "gelu",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        choice(get_args(ReadOut), readout=readout)
        at_least(1, num_layers=num_layers)
        if random_signs and position_dim is None:
            raise ValueError("random_signs: needs positions, but position_dim is None")
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.readout = readout
        is_local = global_attention is None and readout == "node"
        self.num_hops = num_layers if is_local else None
        self.random_signs = random_signs
        self.embed = SparseLinear(in_channels, hidden_channels)
        self.position_embed = None
        if position_dim is not None:
            self.position_embed = nn.Linear(position_dim, hidden_channels)
        self.dropout = nn.Dropout(dropout_p)
        self.blocks = nn.ModuleList(
            GraphTransformerBlock(
                hidden_channels,
                heads,
                local=local,
                global_attention=global_attention,
                edge_dim=edge_dim,
                mlp_ratio=mlp_ratio,
                dropout_p=dropout_p,
                attention_dropout_p=attention_dropout_p,
                activation=activation,
                backend=backend,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_channels)
        self.pool = None
        if readout == "graph":
            self.pool = GraphPool(hidden_channels, heads, backend=backend)
        self.head = nn.Linear(hidden_channels * (1 + (readout == "edge")), num_classes)

    def forward(
        self,
        x: Annotated[Tensor, "nodes channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | Edges | ReceptiveField,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | None = None,
        *,
        batch: Annotated[Tensor, "nodes", int] | None = None,
        num_graphs: int | None = None,
        positions: Annotated[Tensor, "nodes position_dim"] | None = None,
        pairs: Annotated[Tensor, "2 pairs", int] | None = None,
    ) -> Annotated[Tensor, "rows classes"]:
        """Logits of nodes, graphs or pairs, by the readout.

        Args:
            x: dense or sparse CSR.
            edge_index: as in `GraphAttention`; given as a tensor it is sorted at every call. A
                receptive field is for local attention and the readout "node".
            batch: the graph of each node, in their order; None: all are of one.
            num_graphs: how many there are, where the last of them have no nodes.
            pairs: of the readout "edge": the two nodes of each pair.
        """
        if (positions is None) != (self.position_embed is None):
            wanted = "none" if self.position_embed is None else "[nodes, position_dim]"
            given = None if positions is None else list(positions.shape)
            raise ValueError(f"positions: expected {wanted}, got {given}")
        if (pairs is None) != (self.readout != "edge"):
            given = None if pairs is None else list(pairs.shape)
            raise ValueError(f"pairs: only for the readout 'edge', got {given} in {self.readout!r}")
        hops = edges_of_layers(edge_index, edge_attr, x.shape[0], len(self.blocks))
        lengths = torch.tensor([x.shape[0]], device=x.device)
        if batch is not None:
            lengths = graph_lengths(batch, num_graphs)
        x = self.embed(x)
        if positions is not None and self.position_embed is not None:
            if self.random_signs and self.training:
                signs = torch.randint(0, 2, positions.shape[1:], device=x.device) * 2 - 1
                positions = positions * signs
            x = x + self.position_embed(positions.to(x.dtype))
        x = self.dropout(x)
        mask = Packed(lengths) if len(lengths) > 1 else None
        for block, (edges, features) in zip(self.blocks, hops, strict=True):
            x = block(x, edges, features, mask=mask)
        x = self.norm(x)
        if self.pool is not None:
            x = self.pool(x, lengths)
        elif pairs is not None:
            x = torch.cat([x[pairs[0]], x[pairs[1]]], dim=1)
        return self.head(x)
