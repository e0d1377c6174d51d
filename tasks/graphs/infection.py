"""Random graphs whose labels are distances to infected nodes, along known shortest paths."""

from typing import Any

import networkx as nx
import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.arguments import at_least, held_out
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.splits import masks


class InfectionData(GraphDataModule):
    """A random directed graph with infected nodes; a node's label is its distance to the nearest.

    The features of a node are [0, 1] if it is infected, otherwise [1, 0]. The class of a node is
    the length of the shortest path to it from an infected node: 0 for an infected one, and
    `max_distance` + 1 if the path is longer or there is none. A network needs `max_distance`
    layers.

    `true_edges` are the edges of the shortest path, to compare maps of edges with. Nodes with
    several shortest paths are not scored, since one path is enough and none of its edges would be
    necessary. A random edge is right with the probability path length / edges that reach the node.
    A random map has AUROC 0.5, and the true one 1.

    Sources: Baldassarre and Azizpour, Explainability Techniques for Graph Convolutional Networks,
    2019; Faber et al., When Comparing to Ground Truth is Wrong, 2021, who leave out nodes with
    several paths.

    Args:
        num_nodes: number of nodes.
        mean_degree: mean number of edges into a node.
        num_infected: number of infected nodes.
        max_distance: the longest distance with a class of its own.
        val_fraction: share of the nodes for validation.
        test_fraction: share of the nodes for the test.

    The other arguments are those of `GraphDataModule`; `seed` is also that of the graph.

    Raises:
        ValueError: an argument out of range.
    """

    targets = ("classes",)

    def __init__(
        self,
        *,
        num_nodes: int = 2000,
        mean_degree: float = 3.0,
        num_infected: int = 60,
        max_distance: int = 3,
        val_fraction: float = 0.2,
        test_fraction: float = 0.3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(2, num_nodes=num_nodes)
        at_least(1, max_distance=max_distance)
        held_out(val_fraction=val_fraction, test_fraction=test_fraction)
        if not 0 < mean_degree <= num_nodes - 1:
            raise ValueError(
                f"mean_degree: expected above 0, at most {num_nodes - 1}, got {mean_degree}"
            )
        if not 1 <= num_infected < num_nodes:
            raise ValueError(f"num_infected: expected 1 to {num_nodes - 1}, got {num_infected}")
        self.num_nodes = num_nodes
        self.mean_degree = mean_degree
        self.num_infected = num_infected
        self.max_distance = max_distance
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self._last_edge: Tensor | None = None

    def load(self) -> Data:
        generator = torch.Generator().manual_seed(self.seed)
        count = self.num_nodes
        graph = nx.gnm_random_graph(count, round(count * self.mean_degree), self.seed, True)
        edge_index = torch.tensor(sorted(graph.edges)).T.contiguous()
        infected = torch.zeros(count, dtype=torch.bool)
        infected[torch.randperm(count, generator=generator)[: self.num_infected]] = True
        distance, self._last_edge = shortest_paths(infected, edge_index, self.max_distance)
        farther = self.max_distance + 1
        self.class_names = [*map(str, range(farther)), f"{farther} or more"]
        val, test = (round(count * part) for part in (self.val_fraction, self.test_fraction))
        order = torch.randperm(count, generator=generator)
        return Data(
            x=torch.stack([~infected, infected], dim=1).float(),
            y=distance,
            edge_index=edge_index,
            **masks(count, order[val + test :], order[:val], order[val : val + test]),
        )

    @property
    def num_classes(self) -> int:
        return self.max_distance + 2

    def true_edges(self, graph: Data, index: int) -> Tensor | None:
        """Return the edges of the shortest path from an infected node to a node, after `setup`.

        Args:
            graph: the whole graph, `self.graph`.
            index: the number of the node.

        Returns:
            bool [edges]; None if the node is infected, is farther than `max_distance`, or has
            several such paths.
        """
        assert self._last_edge is not None
        right = torch.zeros(graph.num_edges, dtype=torch.bool)
        while (edge := int(self._last_edge[index])) >= 0:
            right[edge] = True
            index = int(graph.edge_index[0, edge])
        return right if right.any() else None


def shortest_paths(infected: Tensor, edge_index: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the distance of nodes from infected ones, and the last edge of the path.

    Returns:
        the distances [nodes], `longest` + 1 for farther nodes; and the number [nodes] of the edge
        that ends the shortest path, −1 for infected nodes, farther ones, and nodes with several
        such paths.
    """
    source, target = edge_index
    distance = torch.where(infected, 0, longest + 1)
    num_paths = infected.long()
    last_edge = torch.full_like(distance, -1)
    for length in range(1, longest + 1):
        distance[target[(distance[source] == length - 1) & (distance[target] > length)]] = length
        on_path = (distance[source] == length - 1) & (distance[target] == length)
        edges = on_path.nonzero()[:, 0]
        num_paths.index_add_(0, target[edges], num_paths[source[edges]])
        last_edge[target[edges]] = edges
    last_edge[num_paths != 1] = -1
    return distance, last_edge
