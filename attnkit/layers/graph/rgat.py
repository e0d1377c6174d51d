"""Attention of relational graph attention networks."""

from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least, choice, divides
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.multihead import matrix_of
from attnkit.core.weights import Indices, of_edges
from attnkit.layers.graph.inputs import check_features
from attnkit.layers.graph.typed_attention import Heads, TypedAttention
from attnkit.layers.graph.typed_edges import (
    AttentionMechanism,
    TypedEdges,
    grouped,
    remembered_typed_edges,
    split_heads,
)

AttentionMode = Literal["additive-self-attention", "multiplicative-self-attention"]


class RGATAttention(TypedAttention):
    """Attention over edges of several relations (Busbridge et al., Relational Graph Attention
    Networks, 2019).

        output_i = Σ_e weight_e · W_r x_j + b        over the edges e of relation r from j to i
        weight_e = softmax_e(score_e),   score_e = LeakyReLU(Q W_r x_i + K W_r x_j + E e_ij)

    or, if multiplicative, score_e = Q W_r x_i · K W_r x_j · E e_ij, without the last factor if
    edges have no features. The softmax runs over the edges of all relations into a node,
    "across-relation" (the paper's ARGAT), or over those of each relation, "within-relation"
    (WIRGAT), and the outputs are summed. Both are one call of the edge kernels. Equal to PyG's
    `RGATConv`, which `interop.from_pyg` converts and whose Q and K read all heads.

    Args:
        in_channels: channels of the nodes.
        out_channels: channels of a head.
        num_relations: number of edge types.
        num_bases: number of matrices that relations share and W_r is a combination of (basis
            decomposition); None: no sharing.
        num_blocks: number of diagonal blocks that W_r consists of; None: W_r is a full matrix.
        attention_mechanism: "across-relation" or "within-relation".
        attention_mode: "additive-self-attention" or "multiplicative-self-attention".
        heads: number of heads.
        dim: number of scores of a head, each with an output of its own; 1 for additive attention.
        concat: True concatenates the heads, heads · dim · out_channels; False takes their mean.
        negative_slope: slope of the LeakyReLU.
        dropout_p, backend: as in `MultiHeadAttention`.
        edge_dim: channels of the edge features; None: edges have no features.
        bias: whether the output adds a bias.

    Raises:
        ValueError: options that do not fit.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        *,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        attention_mechanism: AttentionMechanism = "across-relation",
        attention_mode: AttentionMode = "additive-self-attention",
        heads: int = 1,
        dim: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout_p: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(heads, attention_mechanism, dropout_p, backend)
        at_least(
            1,
            in_channels=in_channels,
            out_channels=out_channels,
            num_relations=num_relations,
            num_bases=num_bases,
            dim=dim,
            edge_dim=edge_dim,
        )
        choice(get_args(AttentionMode), attention_mode=attention_mode)
        is_additive = attention_mode == "additive-self-attention"
        if is_additive and dim != 1:
            raise ValueError(f"dim: expected 1 for additive attention, got {dim}")
        if not is_additive and negative_slope != 0.2:
            raise ValueError(
                f"negative_slope: only additive attention has one, got {negative_slope}"
            )
        if num_bases is not None and num_blocks is not None:
            raise ValueError(
                f"num_bases and num_blocks: expected one of them, got {num_bases} and {num_blocks}"
            )
        width = heads * out_channels
        if num_blocks is not None:
            divides("num_blocks", num_blocks, in_channels=in_channels, heads_and_channels=width)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.num_relations = num_relations
        self.num_bases = num_bases
        self.num_blocks = num_blocks
        self.attention_mode: AttentionMode = attention_mode
        self.dim = dim
        self.concat = concat
        self.negative_slope = negative_slope
        self.edge_dim = edge_dim
        if num_bases is not None:
            self.coefficients = nn.Parameter(torch.empty(num_relations, num_bases))
            self.bases = nn.Parameter(torch.empty(num_bases, in_channels, width))
        elif num_blocks is not None:
            blocks = num_relations, num_blocks, in_channels // num_blocks, width // num_blocks
            self.blocks = nn.Parameter(torch.empty(blocks))
        else:
            self.weight = nn.Parameter(torch.empty(num_relations, in_channels, width))
        scores = heads * dim
        self.query_weight = nn.Parameter(torch.empty(width, scores))
        self.key_weight = nn.Parameter(torch.empty(width, scores))
        self.edge_proj = None
        if edge_dim is not None:
            self.edge_proj = nn.Linear(edge_dim, width, bias=False)
            self.edge_weight = nn.Parameter(torch.empty(width, scores))
        size = dim * out_channels * (heads if concat else 1)
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set matrices Xavier-uniform and the bias to 0."""
        for name, parameter in self.named_parameters():
            if name == "bias":
                nn.init.zeros_(parameter)
            else:
                bound = (6 / (parameter.shape[-2] + parameter.shape[-1])) ** 0.5
                nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Annotated[Tensor, "nodes in_channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | TypedEdges,
        edge_type: Annotated[Tensor, "edges", int] | None = None,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | Annotated[Tensor, "edges"] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Annotated[Tensor, "nodes out_channels"]:
        """Compute what nodes gather from their neighbours of all relations.

        Args:
            x: nodes; `HeteroData` gives them, and `edge_type`, by `data.to_homogeneous()`.
            edge_index: sources and targets, sorted once as in `GraphAttention`; or
                `TypedEdges(edge_index, num_nodes, edge_type, num_relations)`.
            edge_type: the relation of each edge; None with `TypedEdges`.
            edge_attr: features of the edges; a single channel may omit its dimension.
            return_attention_weights: return (edges, weights) too, as PyG's layer does.

        Returns:
            Nodes with heads · dim · out_channels, or dim · out_channels without `concat`.

        Raises:
            ValueError, TypeError, IndexError: nodes or edges of another shape or type.
        """
        given = self._heads(x, edge_index, edge_type, edge_attr)
        output = given.edges.summed(self._attend(given), self.attention_mechanism).transpose(0, 1)
        if not self.concat:
            output = output.unflatten(1, (self.heads, self.dim)).mean(dim=1)
        output = output.flatten(1)
        output = output if self.bias is None else output + self.bias
        if return_attention_weights is None:
            return output
        return output, (given.edges.edge_index, self._weights(given))  # type: ignore[return-value]

    def attention_weights(
        self,
        x: Annotated[Tensor, "nodes in_channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | TypedEdges,
        edge_type: Annotated[Tensor, "edges", int] | None = None,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | Annotated[Tensor, "edges"] | None = None,
        *,
        rows: Indices = None,
        heads: Indices = None,
    ) -> Annotated[Tensor, "rows chosen_heads"]:
        """Return the weights that `forward` uses on the same arguments, before dropout.

        Args:
            rows: which edges, None for all.
            heads: which of `heads · dim`, None for all.

        Returns:
            Row e belongs to edge e of `edge_index`.
        """
        given = self._heads(x, edge_index, edge_type, edge_attr)
        return of_edges(self._weights(given), rows, heads)

    def _heads(
        self,
        x: Tensor,
        edge_index: Tensor | TypedEdges,
        edge_type: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Heads:
        """Return heads whose queries and keys are 0; the edge bias holds the scores."""
        if x.ndim != 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"x: expected [nodes, {self.in_channels}], got {list(x.shape)}")
        if isinstance(edge_index, TypedEdges):
            given = edge_index.num_nodes, len(edge_index.edge_types)
            if edge_type is not None or given != (len(x), self.num_relations):
                raise ValueError(
                    f"edge_index: expected TypedEdges of {len(x)} nodes and {self.num_relations} "
                    f"types, and no edge_type, got {given[0]} nodes and {given[1]} types"
                )
            edges = edge_index
        else:
            edges = remembered_typed_edges(edge_index, len(x), edge_type, self.num_relations)
        weight = self._relation_weight()
        sources, targets = edges.sources, edges.targets
        value = grouped(x.index_select(0, sources.node), sources.counts, weight)
        by_target = x.index_select(0, targets.node)
        query = grouped(by_target, targets.counts, weight @ self.query_weight)
        query = query.index_select(0, targets.of_edge)
        key = (value @ self.key_weight).index_select(0, sources.of_edge)
        mask = edges.mask(self.attention_mechanism)
        carried = self._carried(mask, edge_attr)
        if self.attention_mode == "additive-self-attention":
            scores = query + key if carried is None else query + key + carried
            scores = F.leaky_relu(scores, self.negative_slope)
        else:
            scores = query * key if carried is None else query * key * carried
        query = value.new_zeros(self.heads * self.dim, mask.sizes[0], 1)
        key = value.new_zeros(self.heads, mask.sizes[1], 1)
        value = split_heads(value, self.heads)
        return Heads(edges, query, key, value, EdgeFeatures(bias=scores.T))

    def _relation_weight(self) -> Tensor:
        """Return W of each relation, [relations, in_channels, heads · out_channels]."""
        if self.num_bases is not None:
            return torch.tensordot(self.coefficients, self.bases, dims=1)
        if self.num_blocks is not None:
            eye = torch.eye(self.num_blocks, dtype=self.blocks.dtype, device=self.blocks.device)
            full = torch.einsum("rbio,bc->rbico", self.blocks, eye)
            return full.reshape(self.num_relations, self.in_channels, -1)
        return self.weight

    def _carried(self, edges: Edges, edge_attr: Tensor | None) -> Tensor | None:
        """Return the edge features' part of the scores, [edges, heads · dim]."""
        edge_attr = check_features(edge_attr, edges, self.edge_dim)
        if self.edge_proj is None or edge_attr is None:
            return None
        return edge_attr @ (matrix_of(self.edge_proj, edge_attr) @ self.edge_weight)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.out_channels}, "
            f"{self.num_relations}, heads={self.heads})"
        )
