"""Blocks of graph models: attention with norm, activation, dropout and MLP."""

from typing import Annotated, Any, Literal, get_args

from torch import Tensor, fx, nn

from attnkit.core.arguments import choice
from attnkit.core.masks.edges import Edges
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.inputs import EdgeModule
from attnkit.layers.graph.sparse import SparseDropout

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
