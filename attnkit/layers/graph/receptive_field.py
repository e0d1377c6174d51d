"""The receptive field: the nodes and edges that a graph network's outputs depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.masks.edges import Edges
from attnkit.core.operators.sparse import chosen_rows
from attnkit.layers.graph.inputs import as_edges, check_features


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """The nodes and edges that the outputs at some nodes depend on, layer by layer.

    A loss over 140 labels needs the last layer at 140 nodes, the layer before at their neighbours,
    and so on. The outputs equal those of the whole graph, without computing what is not needed. A
    model that gets a receptive field instead of edges returns only the wanted nodes, in their
    order.

        field = ReceptiveField.of(edge_index, len(x), train_nodes, model.num_hops)
        logits = model(field.rows(x), field)        # = model(x, edge_index)[train_nodes]

    nodes: the nodes to read: the wanted ones first, then those one edge away, and so on.
    edges: the edges of each layer, first layer first, as positions in `nodes`. The targets of a
        layer are the first of its sources, and the sources of the next layer.
    kept: for each layer, the indices of its edges among the caller's.
    """

    nodes: Annotated[Tensor, "_", int]
    edges: tuple[Edges, ...]
    kept: tuple[Annotated[Tensor, "_", int], ...]

    @classmethod
    def of(
        cls,
        edge_index: Annotated[Tensor, "2 edges", int],
        num_nodes: int,
        wanted: Annotated[Tensor, "targets", int],
        num_layers: int,
    ) -> ReceptiveField:
        """Return the receptive field of layers that each send messages along edges once.

        Args:
            edge_index: sources in row 0, targets in row 1.
            num_nodes: number of nodes of the graph.
            wanted: the nodes whose outputs are needed, each once.
            num_layers: number of layers, at least 1.

        Raises:
            ValueError: a node that is wanted twice.
        """
        source, target = edge_index.long()
        place = source.new_full((num_nodes,), -1)
        place[wanted] = torch.arange(len(wanted), device=place.device)
        nodes = [wanted.long()]
        if int((place >= 0).sum()) != len(wanted):
            raise ValueError("wanted: expected each node once")
        sizes, kept = [len(wanted)], []
        for _ in range(num_layers):
            kept.append((place[target] >= 0).nonzero().squeeze(1))
            reached = source[kept[-1]]
            nodes.append(reached[place[reached] < 0].unique())
            sizes.append(sizes[-1] + len(nodes[-1]))
            place[nodes[-1]] = torch.arange(sizes[-2], sizes[-1], device=place.device)
        edges = [
            Edges(place[edge_index[:, kept[hop]].long()], sizes[hop], sizes[hop + 1])
            for hop in range(num_layers)
        ]
        return cls(torch.cat(nodes), tuple(edges[::-1]), tuple(kept[::-1]))

    @property
    def num_edges(self) -> int:
        """Number of edges of all layers together."""
        return sum(edges.num_edges for edges in self.edges)

    def rows(self, x: Annotated[Tensor, "nodes channels"]) -> Annotated[Tensor, "_ channels"]:
        """Select the features of the nodes to read from those of all nodes, dense or sparse CSR."""
        return chosen_rows(x, self.nodes)


def edges_of_layers(
    edge_index: Tensor | Edges | ReceptiveField,
    edge_attr: Tensor | None,
    num_nodes: int,
    num_layers: int,
    edge_dim: int | None,
) -> Sequence[tuple[Edges, Tensor | None]]:
    """Return the edges and edge features of each layer.

    Raises:
        ValueError, TypeError: a receptive field of another number of nodes or layers; edges or
            features of another shape or type. All checks precede any computation.
    """
    if not isinstance(edge_index, ReceptiveField):
        edges = as_edges(edge_index, num_nodes)
        return [(edges, check_features(edge_attr, edges, edge_dim))] * num_layers
    given = len(edge_index.nodes), len(edge_index.edges)
    if given != (num_nodes, num_layers):
        raise ValueError(
            f"edge_index: expected a receptive field of {num_nodes} nodes, as x has, and "
            f"{num_layers} layers, got {given[0]} nodes and {given[1]} layers"
        )
    attributes = [edge_attr if edge_attr is None else edge_attr[kept] for kept in edge_index.kept]
    hops = zip(edge_index.edges, attributes, strict=True)
    return [(edges, check_features(given, edges, edge_dim)) for edges, given in hops]
