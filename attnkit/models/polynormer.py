"""Polynormer: local attention, then global linear attention, both gated by products of nodes."""

from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, divides, share
from attnkit.core.attend import attend
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.sequences import Packed
from attnkit.core.normalizers import Linear
from attnkit.layers.graph.attention import GraphAttention, GraphScoreName
from attnkit.layers.graph.blocks import SparseLinear
from attnkit.layers.graph.inputs import as_edges
from attnkit.models.graph_model import GraphModel, Pool, ReadOut


class PolynormerLocal(nn.Module):
    """A local layer: x = β y + (1 − β) norm(relu(W_h x) ⊙ y),
    y = dropout(relu(batch_norm(attention(x) + W x)))."""

    def __init__(self, dim: int, attention: GraphAttention, beta: float, dropout_p: float) -> None:
        super().__init__()
        self.attention = attention
        self.residual_proj = nn.Linear(dim, dim)
        self.gate_proj = nn.Linear(dim, dim)
        self.batch_norm = nn.BatchNorm1d(dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout_p)
        self.beta = beta

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        gate = self.gate_proj(x).relu()
        y = self.attention(x, edges) + self.residual_proj(x)
        y = self.dropout(self.batch_norm(y).relu())
        return (1 - self.beta) * self.norm(gate * y) + self.beta * y


class PolynormerGlobal(nn.Module):
    """A global layer: x = dropout(relu(W_o ((W_h x + β) ⊙ norm(attention(x))))), with linear
    attention whose feature map is the logistic function."""

    def __init__(self, dim: int, heads: int, beta: float, dropout_p: float, backend: str) -> None:
        super().__init__()
        self.heads = heads
        self.query_proj = nn.Linear(dim, dim, bias=False)
        self.key_proj = nn.Linear(dim, dim, bias=False)
        self.value_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.out_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout_p)
        self.beta = beta
        self.backend = backend

    def forward(self, x: Tensor, mask: Packed | None = None) -> Tensor:
        query, key, value = (
            proj(x).unflatten(1, (self.heads, -1)).transpose(0, 1)[None]
            for proj in (self.query_proj, self.key_proj, self.value_proj)
        )
        seen = attend(
            query, key, value, mask=mask, normalizer=Linear("sigmoid"), backend=self.backend
        )
        seen = seen[0].transpose(0, 1).flatten(1)
        y = self.norm(seen) * (self.gate_proj(x) + self.beta)
        return self.dropout(self.out_proj(y).relu())


class Polynormer(GraphModel):
    """Polynomial-expressive graph transformer in linear time (Deng et al., Polynormer, 2024).

        x = dropout(W x)
        x = local(x, edges)             num_local_layers times; Σ x is the sum of their outputs
        logits = W_l Σ x                in the first local_steps steps of training
        x = norm(Σ x)
        x = global(x)                   num_global_layers times
        logits = W_g x

    Local attention is GAT's without self-loops; it may have any score of `GraphAttention`. Training
    goes from local to global: in its first `local_steps` steps only the local layers are trained
    and give the logits, then all layers; the buffer `steps` counts the steps. Layers that are not
    trained yet have no gradients, for which DDP needs `find_unused_parameters`.

    Nodes [nodes, in_channels], dense or sparse CSR, in and logits [nodes, num_classes] out; the
    readouts "graph" and "edge", which the paper does not have, give [graphs, num_classes] and
    [pairs, num_classes]. A sampled sub-graph is a graph of its own: global attention sees its nodes
    only.

    Args:
        in_channels: channels of the nodes.
        hidden_channels: channels between layers, all heads together.
        num_classes: number of logits.
        num_local_layers, num_global_layers: number of layers of each kind.
        heads: heads of every layer, a divisor of `hidden_channels`.
        score: score of local attention.
        beta: share of a layer's output that is not gated, 0 to 1.
        local_steps: number of training steps with the local layers alone; 0: none.
        readout, pool: what W_g and W_l read, as in `GraphTransformer`, the same for both.
        dropout_p: dropout of the input and the local layers.
        global_dropout_p: dropout of the global layers.
        backend: the attention kernel, as in `attnkit.attend`.

    Raises:
        ValueError: sizes that do not divide, or a number out of range.
    """

    steps: Tensor

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_classes: int,
        *,
        num_local_layers: int = 7,
        num_global_layers: int = 2,
        heads: int = 1,
        score: GraphScoreName = "gat",
        beta: float = 0.9,
        local_steps: int = 0,
        readout: ReadOut = "node",
        pool: Pool = "attention",
        dropout_p: float = 0.5,
        global_dropout_p: float = 0.5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        at_least(1, num_local_layers=num_local_layers, num_global_layers=num_global_layers)
        at_least(0, local_steps=local_steps)
        divides("heads", heads, hidden_channels=hidden_channels)
        share(dropout_p=dropout_p, global_dropout_p=global_dropout_p)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta: expected 0 to 1, got {beta}")
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.local_steps = local_steps
        dim = hidden_channels
        self.embed = SparseLinear(in_channels, dim)
        self.dropout = nn.Dropout(dropout_p)
        self.local_layers = nn.ModuleList(
            PolynormerLocal(
                dim,
                GraphAttention(
                    dim, dim // heads, heads, score=score, out_bias=False, backend=backend
                ),
                beta,
                dropout_p,
            )
            for _ in range(num_local_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.global_layers = nn.ModuleList(
            PolynormerGlobal(dim, heads, beta, global_dropout_p, backend)
            for _ in range(num_global_layers)
        )
        width = self._reads(readout, pool, dim, heads, backend)
        self.local_head = nn.Linear(width, num_classes) if local_steps else None
        self.head = nn.Linear(width, num_classes)
        self.register_buffer("steps", torch.empty((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the step count to 0."""
        self.steps.zero_()

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
        mask = None if lengths is None else Packed(lengths)
        is_local = self.local_head is not None and int(self.steps) < self.local_steps
        x = self.dropout(self.embed(x))
        total = torch.zeros_like(x)
        for layer in self.local_layers:
            x = layer(x, edges)
            total = total + x
        head, x = (self.local_head, total) if is_local else (self.head, self.norm(total))
        for layer in () if is_local else self.global_layers:
            x = layer(x, mask)
        if self.training:
            self.steps += 1
        assert head is not None
        return head(self._read(x, lengths, pairs))
