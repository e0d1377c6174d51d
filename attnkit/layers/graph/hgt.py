"""Attention of the Heterogeneous Graph Transformer."""

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.layers.graph.typed_attention import Heads, TypedLinear, TypedNodeAttention
from attnkit.layers.graph.typed_edges import (
    AttentionMechanism,
    EdgesByType,
    Metadata,
    NodesByType,
    TypedEdges,
    as_typed_edges,
    split_heads,
)


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
