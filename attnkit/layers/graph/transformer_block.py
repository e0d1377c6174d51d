"""The block of a graph transformer, and what reads graphs or edges out of nodes."""

from __future__ import annotations

from typing import Literal

import torch
from timm.layers import trunc_normal_tf_
from torch import Tensor, nn

from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.sequences import Packed
from attnkit.core.multihead import MultiHeadAttention
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.tokens.block import Activation, make_mlp

GlobalAttention = Literal["softmax", "linear"]


class GraphTransformerBlock(nn.Module):
    """Pre-norm block of local and global attention (Rampášek et al., GraphGPS, 2022).

        y = norm(x)
        x = x + dropout(local(y)) + dropout(global(y))
        x = x + mlp(norm(x))

    Local attention goes along the edges; global attention from every node to all nodes of its
    graph, graphs packed one after the other without padding. GraphGPS normalises after each branch
    rather than before all of them.

    Nodes [nodes, dim] in and out.

    Args:
        dim: channels of the nodes.
        heads: of either attention, a divisor of `dim`.
        local: the score of the local attention, as in `GraphAttention`; None: there is none.
        global_attention: "softmax"; "linear", in time linear in the nodes, for large graphs; None:
            there is none.
        edge_dim: channels of the edges, which local attention reads; None: they carry nothing.
        mlp_ratio: the MLP's width over `dim`.
        dropout_p: after the attentions and in the MLP.
        attention_dropout_p: of the attention weights; of "linear" there are none to drop.
        activation: of the MLP, "gelu" or "gelu_tanh".
        backend: the kernel, as in `attnkit.attend`.

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
        if heads < 1 or dim % heads:
            raise ValueError(f"heads: {heads} does not divide dim {dim}")
        if local is None and edge_dim is not None:
            raise ValueError(f"edge_dim: only local attention reads edges, got {edge_dim}")
        self.attention_norm = nn.LayerNorm(dim)
        self.local = None
        if local is not None:
            attention = GraphAttention(
                dim,
                dim // heads,
                heads,
                score=local,
                edge_dim=edge_dim,
                dropout_p=attention_dropout_p,
                backend=backend,
            )
            self.local = attention
            self.local_proj = nn.Linear(dim, dim)
        self.everywhere = None
        if global_attention is not None:
            self.everywhere = MultiHeadAttention(
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
            x = x + self.dropout(self.local_proj(self.local(normed, edges, edge_attr)))
        if self.everywhere is not None:
            x = x + self.dropout(self.everywhere(normed[None], mask=mask)[0])
        return x + self.mlp(self.mlp_norm(x))


class GraphPool(nn.Module):
    """One vector for each graph: the block with one learned query for each (Lee et al., Set
    Transformer, 2019).

        pooled_g = attention(query, x_i of graph g)

    Nodes [nodes, dim] in, [graphs, dim] out. A graph without nodes gives the bias of the output.
    """

    def __init__(self, dim: int, heads: int, *, backend: str = "auto") -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(1, 1, dim))
        self.attention = MultiHeadAttention(dim, heads, backend=backend)
        trunc_normal_tf_(self.query, std=dim**-0.5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """`lengths`: how many of the nodes, which are in the order of graphs, are of each."""
        query = self.query.expand(-1, len(lengths), -1)
        return self.attention(query, x[None], mask=Packed(torch.ones_like(lengths), lengths))[0]


def graph_lengths(batch: Tensor, num_graphs: int | None = None) -> Tensor:
    """How many nodes each graph has, from PyG's `batch` [nodes], the graph of each node.

    Raises:
        ValueError: the nodes are not in the order of their graphs.
    """
    if len(batch) > 1 and not bool((batch[1:] >= batch[:-1]).all()):
        raise ValueError("batch: expected nodes in the order of their graphs")
    return torch.bincount(batch, minlength=num_graphs or 0)
