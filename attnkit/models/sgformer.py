"""SGFormer: simple global attention beside a graph convolution network."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, share
from attnkit.core.attend import attend
from attnkit.core.masks.edges import Edges
from attnkit.core.multihead import reset_linear
from attnkit.core.weights import Indices, as_indices
from attnkit.layers.graph.blocks import SparseLinear
from attnkit.layers.graph.inputs import as_edges
from attnkit.models.graph_model import GraphModel, Pool, ReadOut


class SimpleGlobalAttention(nn.Module):
    """The global attention of SGFormer (Wu et al., 2023), which has no softmax.

        weight_h,ij = (δ_ij + cos(q_h,i, k_h,j) / n) / (1 + Σ_j cos(q_h,i, k_h,j) / n)
        output_i = 1/H Σ_h Σ_j weight_h,ij · v_h,j      over all n nodes

    q, k, v are projections of the nodes without bias. The output is computed as
    n v_i + q̂_i (Σ_j k̂_j v_jᵀ) over n + q̂_i · Σ_j k̂_j, where q̂ and k̂ have length 1. So every
    node keeps its own value, and weights may be negative. The paper divides queries and keys by the
    norm of all queries, or keys, together, which makes the second term vanish as n grows; dividing
    each by its own norm is what PyG's `SGFormerAttention` does.

    Nodes [nodes, in_channels] in, of one graph or of several concatenated; [nodes, out_channels]
    out.

    Args:
        in_channels: channels of the nodes.
        out_channels: channels of each head; the output is the mean of the heads.
        heads: number of heads.
    """

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1) -> None:
        super().__init__()
        at_least(1, in_channels=in_channels, out_channels=out_channels, heads=heads)
        self.heads = heads
        size = heads * out_channels
        self.query_proj = nn.Linear(in_channels, size, bias=False)
        self.key_proj = nn.Linear(in_channels, size, bias=False)
        self.value_proj = nn.Linear(in_channels, size, bias=False)

    def forward(
        self,
        x: Annotated[Tensor, "nodes in_channels"],
        lengths: Annotated[Tensor, "_", int] | None = None,
    ) -> Annotated[Tensor, "nodes out_channels"]:
        """Return the nodes after attention.

        Args:
            lengths: number of nodes of each graph; None: all nodes belong to one graph.
        """
        heads = self._heads(x)
        if lengths is None:
            return _attend(*heads)
        of_graphs = (tensor.split(lengths.tolist(), dim=1) for tensor in heads)
        return torch.cat([_attend(*parts) for parts in zip(*of_graphs, strict=True)])

    def attention_weights(
        self,
        x: Annotated[Tensor, "nodes in_channels"],
        lengths: Annotated[Tensor, "_", int] | None = None,
        *,
        rows: Indices = None,
        heads: Indices = None,
    ) -> Annotated[Tensor, "chosen_heads rows nodes"]:
        """Return the weights that `forward` uses implicitly; they are 0 between different graphs.

        Args:
            rows: which nodes look, None for all.
            heads: which heads, None for all.
        """
        query, key, _ = self._heads(x)
        rows = as_indices("rows", rows, x.shape[0], x.device)
        heads = as_indices("heads", heads, self.heads, x.device)
        if lengths is None:
            lengths = torch.tensor([x.shape[0]], device=x.device)
        graph = torch.repeat_interleave(lengths)
        counts = lengths[graph[rows]][:, None]
        weights = query[heads][:, rows] @ key[heads].mT / counts
        weights = weights.masked_fill(graph[rows][:, None] != graph, 0.0)
        weights[:, torch.arange(len(rows), device=x.device), rows] += 1
        return weights / weights.sum(dim=2, keepdim=True)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys of length 1, and values, each [heads, nodes, out_channels]."""
        query, key, value = (
            proj(x).unflatten(1, (self.heads, -1)).transpose(0, 1)
            for proj in (self.query_proj, self.key_proj, self.value_proj)
        )
        unit = nn.functional.normalize
        return unit(query, dim=2), unit(key, dim=2), value


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output [nodes, out_channels] of one graph from [heads, nodes, out_channels]."""
    count = max(1, query.shape[1])
    gathered = query @ (key.mT @ value)
    total = query @ key.sum(dim=1)[:, :, None]
    return ((count * value + gathered) / (count + total)).mean(dim=0)


class GraphConvolution(nn.Module):
    """The graph convolution of Kipf and Welling (2017), computed by the edge attention kernels.

        output_i = Σ_e W x_j / √(d_i d_j) + b = √d_i · mean_e(W x_j / √d_j) + b

    over the edges e from j to i and one self-loop, which replaces the graph's own; d_i is their
    number. A mean over the neighbours is attention with equal scores. Equal to PyG's
    `GCNConv` with its defaults, without its memory of edges × channels.

    Nodes [nodes, in_channels] in, dense, and [nodes, out_channels] out.
    """

    def __init__(self, in_channels: int, out_channels: int, backend: str = "auto") -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.backend = backend
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the matrix Xavier-uniform and the bias to 0."""
        reset_linear(self.proj)
        nn.init.zeros_(self.bias)

    def forward(
        self, x: Annotated[Tensor, "nodes in_channels"], edges: Edges
    ) -> Annotated[Tensor, "nodes out_channels"]:
        looped = edges.with_loops
        target = looped.edge_index[1]
        ones = x.new_ones(target.shape[0])  # bincount cannot be exported
        root = x.new_zeros(x.shape[0]).index_add(0, target, ones).sqrt()[:, None]
        value = self.proj(x) / root
        equal = value.new_zeros(1, x.shape[0], 1)
        mean = attend(equal, equal, value[None], mask=looped, backend=self.backend)
        return mean[0] * root + self.bias


class SGFormer(GraphModel):
    """Simplified graph transformer for large graphs (Wu et al., SGFormer, 2023).

        g = dropout(relu(layer_norm(W_g x)))
        g = dropout(relu(layer_norm((attention(g) + g) / 2)))      num_layers times
        c = c_0 = dropout(relu(batch_norm(W_c x)))
        c = dropout(relu(batch_norm(convolution(c, edges)))) + c_0 num_convolutions times
        logits = W (γ c + (1 − γ) g)

    with `SimpleGlobalAttention` and `GraphConvolution`; time and memory are linear in nodes and
    edges. It is the network of PyG's `SGFormer` with logits instead of log-probabilities, and
    without the influence that the largest graph of a batch has there on the others. A sampled
    sub-graph is a graph of its own: global attention sees its nodes only.

    Nodes [nodes, in_channels], dense or sparse CSR, in and logits [nodes, num_classes] out; the
    readouts "graph" and "edge", which the paper does not have, give [graphs, num_classes] and
    [pairs, num_classes].

    Args:
        in_channels: channels of the nodes.
        hidden_channels: channels of both branches.
        num_classes: number of logits.
        num_layers: number of layers of global attention; the paper's is one.
        heads: heads of global attention, each as wide as the branch.
        num_convolutions: number of layers of the convolution branch, along the edges.
        graph_weight: γ, the weight of the convolution branch, 0 to 1.
        readout, pool: what W reads, as in `GraphTransformer`.
        dropout_p: dropout of the branch of global attention.
        convolution_dropout_p: dropout of the convolution branch.
        backend: the kernel of the convolutions, as in `attnkit.attend`.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_classes: int,
        *,
        num_layers: int = 1,
        heads: int = 1,
        num_convolutions: int = 2,
        graph_weight: float = 0.5,
        readout: ReadOut = "node",
        pool: Pool = "attention",
        dropout_p: float = 0.5,
        convolution_dropout_p: float = 0.5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        at_least(1, num_layers=num_layers, num_convolutions=num_convolutions)
        share(dropout_p=dropout_p, convolution_dropout_p=convolution_dropout_p)
        if not 0 <= graph_weight <= 1:
            raise ValueError(f"graph_weight: expected 0 to 1, got {graph_weight}")
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.graph_weight = graph_weight
        size = hidden_channels
        self.global_embed = SparseLinear(in_channels, size)
        self.attentions = nn.ModuleList(
            SimpleGlobalAttention(size, size, heads) for _ in range(num_layers)
        )
        self.global_ends = nn.ModuleList(
            _end(nn.LayerNorm(size), dropout_p) for _ in range(num_layers + 1)
        )
        self.local_embed = SparseLinear(in_channels, size)
        self.convolutions = nn.ModuleList(
            GraphConvolution(size, size, backend) for _ in range(num_convolutions)
        )
        self.local_ends = nn.ModuleList(
            _end(nn.BatchNorm1d(size), convolution_dropout_p) for _ in range(num_convolutions + 1)
        )
        self.head = nn.Linear(self._reads(readout, pool, size, 1, backend), num_classes)

    def forward(
        self,
        x: Annotated[Tensor, "nodes channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | Edges,
        *,
        batch: Annotated[Tensor, "nodes", int] | None = None,
        num_graphs: int | None = None,
        pairs: Annotated[Tensor, "2 pairs", int] | None = None,
    ) -> Annotated[Tensor, "rows classes"]:
        """Return logits of nodes, graphs or pairs, by the readout.

        Args:
            edge_index: as in `GraphAttention`.
            batch, num_graphs, pairs: as in `GraphTransformer`.
        """
        edges = as_edges(edge_index, x.shape[0])
        lengths = self._sizes_of_graphs(x, edge_index, batch, num_graphs, pairs)
        first, *ends = self.global_ends
        everywhere = first(self.global_embed(x))
        for attention, end in zip(self.attentions, ends, strict=True):
            everywhere = end((attention(everywhere, lengths) + everywhere) / 2)
        first, *ends = self.local_ends
        local = start = first(self.local_embed(x))
        for convolution, end in zip(self.convolutions, ends, strict=True):
            local = end(convolution(local, edges)) + start
        weight = self.graph_weight
        x = weight * local + (1 - weight) * everywhere
        return self.head(self._read(x, lengths, pairs))


def _end(norm: nn.Module, dropout_p: float) -> Any:
    """Return the norm, activation and dropout that follow every layer."""
    return nn.Sequential(norm, nn.ReLU(), nn.Dropout(dropout_p))
