"""SGFormer: one layer of simple global attention beside a graph convolution network."""

from typing import Annotated, Any

from torch import Tensor, nn

from attnkit.core.arguments import at_least, share
from attnkit.core.masks.edges import Edges
from attnkit.layers.graph.convolution import GraphConvolution
from attnkit.layers.graph.far.global_attention import SimpleGlobalAttention
from attnkit.layers.graph.inputs import as_edges
from attnkit.layers.graph.sparse import SparseLinear
from attnkit.models.readout import GraphModel, Pool, ReadOut


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
