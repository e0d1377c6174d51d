"""Blocks of graph models, and their dropout and linear layer for sparse features."""

from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, fx, nn

from attnkit.core.arguments import choice, divides
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import Edges
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.operators.cpu import dropout
from attnkit.core.operators.sparse import linear, with_values
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.graph.inputs import EdgeModule
from attnkit.layers.transformer import Activation, make_mlp


class SparseDropout(nn.Dropout):
    """`torch.nn.Dropout` that also takes a sparse CSR matrix and draws for its non-zeros only.

    A non-zero becomes 0 with probability p and is divided by 1 − p otherwise. This has the same
    distribution as dropout of the dense matrix, whose zeros stay 0. The sparsity pattern is kept.
    """

    def forward(
        self, input: Annotated[Tensor, "*nodes channels"]
    ) -> Annotated[Tensor, "*nodes channels"]:
        if not self.training or not self.p:
            return input
        if input.layout != torch.sparse_csr:
            return dropout(input, self.p)
        return with_values(input, dropout(input.values(), self.p))


class SparseLinear(nn.Linear):
    """`torch.nn.Linear` that also takes a sparse CSR matrix, with the same parameters and output.

    Raises:
        ValueError: a sparse input requires a gradient, which would be dense.
    """

    def forward(
        self, input: Annotated[Tensor, "*nodes in_channels"]
    ) -> Annotated[Tensor, "*nodes out_channels"]:
        if input.layout == torch.sparse_csr and input.requires_grad:
            raise ValueError(
                "x: expected sparse features without requires_grad, got requires_grad=True; "
                "pass x.to_dense()"
            )
        return linear(input, self.weight, self.bias)


GraphActivation = Literal["elu", "relu", "gelu"]
Norm = Literal["layer", "batch"]


def make_activation(name: GraphActivation) -> nn.Module:
    """Return a new activation module."""
    choice(get_args(GraphActivation), activation=name)
    return {"elu": nn.ELU, "relu": nn.ReLU, "gelu": nn.GELU}[name]()


def make_norm(name: Norm | None, channels: int) -> nn.Module:
    """Return a new normalization module; None gives the identity."""
    choice((*get_args(Norm), None), norm=name)
    norms: dict[Any, Any] = {None: nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
    return norms[name](channels)


class GraphLayer(nn.Module):
    """x = activation(norm(attention(dropout(x)))), a layer of GAT (Veličković et al. 2018)."""

    def __init__(
        self, attention: GraphAttention, norm: nn.Module, activation: nn.Module, dropout_p: float
    ) -> None:
        super().__init__()
        self.dropout = SparseDropout(dropout_p)
        self.attention = attention
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor, edges: Edges, edge_attr: Tensor | None = None) -> Tensor:
        self.attention.check(x, edges, edge_attr)  # errors come before dropout draws numbers
        return self.activation(self.norm(self.attention(self.dropout(x), edges, edge_attr)))


class GraphBlock(EdgeModule):
    """x = x + mlp(attention(norm(x))), a residual block of Platonov et al. 2023.

    The MLP (linear, dropout, activation, linear, dropout) reads the attention's output, which with
    `separate_self` concatenates the node and its neighbourhood. Nodes [nodes, channels] in and out;
    if `Edges` has fewer targets than sources, the output has the first nodes only.

    mlp_ratio: the MLP's width over the channels.
    """

    def __init__(
        self,
        channels: int,
        attention: GraphAttention,
        norm: nn.Module,
        *,
        mlp_ratio: float = 1.0,
        activation: GraphActivation = "gelu",
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        width = round(channels * mlp_ratio)
        if width < 1:
            raise ValueError(
                f"mlp_ratio: expected at least one channel, got {mlp_ratio} of {channels}"
            )
        self.norm = norm
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(attention.width, width),
            nn.Dropout(dropout_p),
            make_activation(activation),
            nn.Linear(width, channels),
            nn.Dropout(dropout_p),
        )

    def forward(
        self,
        x: Annotated[Tensor, "nodes channels"],
        edges: Edges,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | None = None,
    ) -> Annotated[Tensor, "nodes channels"]:
        self.attention.check(x, edges, edge_attr)  # errors come before a batch norm updates
        gathered = self.mlp(self.attention(self.norm(x), edges, edge_attr))
        is_traced = isinstance(edges, fx.Proxy)  # the sizes of traced edges are not known
        return (x if is_traced else x[: edges.sizes[0]]) + gathered


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
