"""The block of a graph transformer, and what reads graphs or edges out of nodes."""

from typing import Literal

import torch
from torch import Tensor, nn

from attnkit.core.arguments import divides
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.sequences import Packed
from attnkit.core.multihead import MultiHeadAttention
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.tokens.block import Activation, make_mlp
from attnkit.layers.tokens.pooling import AttentionPool

GlobalAttention = Literal["softmax", "linear"]
Pooled = Literal["node", "graph"]
"""What logits are of: each node, or each graph, by `GraphPool`."""


class GraphTransformerBlock(nn.Module):
    """Pre-norm block of local and global attention (Rampášek et al., GraphGPS, 2022).

        y = norm(x)
        x = x + dropout(local(y)) + dropout(global(y))
        x = x + mlp(norm(x))

    Local attention goes along the edges; global attention from every node to all nodes of its
    graph, graphs packed one after the other without padding. GraphGPS normalizes after each branch
    rather than before all of them.

    Nodes [nodes, dim] in and out.

    Args:
        dim: channels of the nodes.
        heads: of either attention, a divisor of `dim`.
        local: the score of the local attention, as in `GraphAttention`; None: there is none.
        global_attention: "softmax"; "linear", in time linear in the nodes, for large graphs; None:
            there is none.
        edge_dim: channels of the edges, which local attention reads; None: they carry nothing.
        attention_dropout_p: of the attention weights, which "linear" does not have.
        mlp_ratio, dropout_p, activation, backend: as in `TransformerBlock`.

    Raises:
        ValueError: sizes that do not divide, or neither attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        local: GraphScoreName | None = "scaled_dot",
        global_attention: GlobalAttention | None = "softmax",
        edge_dim: int | None = None,
        mlp_ratio: float = 2.0,
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        activation: Activation = "gelu",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if local is None and global_attention is None:
            raise ValueError("local and global_attention: expected at least one, got None and None")
        divides("heads", heads, dim=dim)
        if local is None and edge_dim is not None:
            raise ValueError(f"edge_dim: only local attention reads edges, got {edge_dim}")
        self.attention_norm = nn.LayerNorm(dim)
        self.local: GraphAttention | None = None
        if local is not None:
            self.local = GraphAttention(
                dim,
                dim // heads,
                heads,
                score=local,
                edge_dim=edge_dim,
                dropout_p=attention_dropout_p,
                backend=backend,
            )
            self.local_proj = nn.Linear(dim, dim)
        self.global_attention = None
        if global_attention is not None:
            self.global_attention = MultiHeadAttention(
                dim,
                heads,
                normalizer=global_attention,
                dropout_p=0.0 if global_attention == "linear" else attention_dropout_p,
                backend=backend,
            )
        self.dropout = nn.Dropout(dropout_p)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = make_mlp(dim, mlp_ratio, activation=activation, dropout_p=dropout_p)

    def forward(
        self,
        x: Tensor,
        edges: Edges,
        edge_attr: Tensor | None = None,
        *,
        mask: Mask | None = None,
    ) -> Tensor:
        """The nodes after the block; `mask` is that of global attention, `Packed` for several
        graphs."""
        normed = self.attention_norm(x)
        if self.local is not None:
            x = x[: edges.sizes[0]] + self.dropout(
                self.local_proj(self.local(normed, edges, edge_attr))
            )
        if self.global_attention is not None:
            x = x + self.dropout(self.global_attention(normed[None], mask=mask)[0])
        return x + self.mlp(self.mlp_norm(x))


class GraphPool(AttentionPool):
    """One vector for each graph: attention pooling of graphs packed one after the other.

        pooled_g = attention(query, x_i of graph g)

    Nodes [nodes, dim] in, [graphs, dim] out. A graph without nodes gives the bias of the output.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """`lengths`: how many of the nodes, which are in the order of graphs, are of each; None:
        all are of one graph."""
        if lengths is None:
            lengths = torch.tensor([x.shape[0]], device=x.device)
        query = self.query.expand(-1, len(lengths), -1)
        return self.attention(query, x[None], mask=Packed(torch.ones_like(lengths), lengths))[0]


def graph_lengths(
    batch: Tensor, num_graphs: int | None = None, *, num_nodes: int | None = None
) -> Tensor:
    """How many nodes each graph has, from PyG's `batch` [nodes], the graph of each node.

    Raises:
        ValueError: the nodes are not in the order of their graphs, or not `num_nodes`.
    """
    if num_nodes is not None and list(batch.shape) != [num_nodes]:
        raise ValueError(f"batch: expected [{num_nodes} nodes], as x has, got {list(batch.shape)}")
    if len(batch) > 1 and not bool((batch[1:] >= batch[:-1]).all()):
        raise ValueError("batch: expected nodes in the order of their graphs")
    return torch.bincount(batch, minlength=num_graphs or 0)
