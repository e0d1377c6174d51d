"""Attention from every node to all nodes, in time and memory linear in the nodes."""

from typing import Annotated

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.core.weights import Indices, as_indices


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
