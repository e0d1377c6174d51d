"""The parts of a graph that the logits of some nodes depend on, found once for each stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.masks.edges import Edges
from attnkit.layers.graph.receptive_field import ReceptiveField

MOST = 0.8  # share of the edges above which a part of the graph is not worth a copy of its features


def sampled_field(batch: Data, num_hops: int | None) -> ReceptiveField | None:
    """Return the receptive field of a sub-graph's seeds; None without the sizes of all hops."""
    sizes, counts = batch.get("num_sampled_nodes"), batch.get("num_sampled_edges")
    if not sizes or not counts or len(counts) != num_hops:
        return None
    nodes, edges = list(accumulate(sizes)), list(accumulate(counts))
    return ReceptiveField(
        torch.arange(nodes[-1], device=batch.x.device),
        tuple(
            Edges(batch.edge_index[:, : edges[hop]], nodes[hop], nodes[hop + 1])
            for hop in reversed(range(num_hops))
        ),
        tuple(torch.arange(edges[hop]) for hop in reversed(range(num_hops))),
    )


@dataclass(frozen=True, eq=False)
class GraphPart:
    """The part of a graph that a stage's logits depend on; `field` is None if it is nearly all."""

    graph: Data
    x: Tensor
    labels: Tensor
    field: ReceptiveField | None

    @classmethod
    def of(cls, graph: Data, mask: Tensor, num_hops: int) -> GraphPart:
        wanted = mask.nonzero().squeeze(1)
        field = ReceptiveField.of(graph.edge_index, graph.num_nodes, wanted, num_hops)
        labels = graph.y[mask]
        if field.num_edges > MOST * num_hops * graph.num_edges:
            return cls(graph, graph.x, labels, None)
        return cls(graph, field.rows(graph.x), labels, field)

    def is_of(self, graph: Data) -> bool:
        return self.graph.edge_index is graph.edge_index and self.graph.x is graph.x
