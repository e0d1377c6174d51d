"""The block of a graph transformer."""

from typing import Literal

from torch import Tensor, nn

from attnkit.core.arguments import divides
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.multihead import MultiHeadAttention
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.tokens.block import Activation, make_mlp

GlobalAttention = Literal["softmax", "linear"]


class GraphTransformerBlock(nn.Module):
    """Pre-norm block of local and global attention (Rampášek et al., GraphGPS, 2022).

        y = norm(x)
        x = x + dropout(local(y)) + dropout(global(y))
        x = x + mlp(norm(x))

    Local attention goes along the edges, global attention from every node to all nodes of its
    graph; graphs are concatenated without padding. GraphGPS normalizes after each branch instead of
    before both.

    Nodes [nodes, dim] in and out.

    Args:
        dim: channels of the nodes.
        heads: number of heads of each attention, a divisor of `dim`.
        local: the score of the local attention, as in `GraphAttention`; None: no local attention.
        global_attention: "softmax"; "linear", in time linear in the nodes, for large graphs; None:
            no global attention.
        edge_dim: channels of the edge features, which local attention reads; None: no features.
        attention_dropout_p: dropout of the attention weights, which "linear" does not have.
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
        """Return the nodes after the block.

        Args:
            mask: the mask of global attention, `Packed` for several graphs.
        """
        normed = self.attention_norm(x)
        if self.local is not None:
            x = x[: edges.sizes[0]] + self.dropout(
                self.local_proj(self.local(normed, edges, edge_attr))
            )
        if self.global_attention is not None:
            x = x + self.dropout(self.global_attention(normed[None], mask=mask)[0])
        return x + self.mlp(self.mlp_norm(x))
