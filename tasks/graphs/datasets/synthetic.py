"""Synthetic graphs whose labels depend on known edges: infection and DictionaryLookup."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import networkx as nx
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from attnkit.core.arguments import at_least, choice, held_out
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.base import SPLITS
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.splits import masks
from attnkit.tasks.loaders import BatchItems, SplitData, make_loader


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


class DictionaryLookupData(SplitData):
    """Complete bipartite graphs of k keys and k queries; a query's label is the value of its key.

    Nodes 0 to k − 1 are the queries; query i has the attribute i and no value. Nodes k to 2k − 1
    are the keys; key k + i has the attribute i and the value π(i), for a permutation π. Every key
    has an edge to every query, and query i is to be labelled π(i). A head whose ranking of the keys
    is the same for all queries, such as GAT's, cannot fit this; GATv2's can.

    The features are the attribute and the value one-hot, side by side (the first value is "none"),
    so that a linear layer of them is the sum of two embeddings, as the authors have. Each
    permutation is in one split only: the test is on unseen combinations. A batch is what
    `torch_geometric.data.Batch` makes of `batch_size` such graphs; its `train_mask`, `val_mask`
    or `test_mask` are the queries.

    `true_edges` are the edges from each query's own key, to compare maps of edges with. While
    values are a permutation, a network can do without this edge, since the value is the one that
    all other keys lack. With `values="independent"` each key's value is drawn alone, and the edge
    is needed. A random edge is right in one of k cases; a constant map has AUROC 0.5, and the
    truth 1.

    Source: Brody et al., How Attentive are Graph Attention Networks?, 2022. They split in two and
    choose the best test accuracy; here there are validation graphs for that.

    Args:
        k: number of keys, at least 2.
        values: "permutation", as published, or "independent": drawn for each key separately.
        num_graphs: number of graphs in all splits, or fewer if there are not as many.
        val_fraction: share of the graphs for validation.
        test_fraction: share of the graphs for the test.
        batch_size: graphs per step and process.
        num_workers: number of processes that make batches.
        seed: seed of the values and their order.

    Raises:
        ValueError: an argument is out of range.
        UserError: in `setup`, if there are too few graphs for three splits.
    """

    num_splits = 1

    def __init__(
        self,
        k: int = 10,
        *,
        values: Literal["permutation", "independent"] = "permutation",
        num_graphs: int = 32000,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        at_least(2, k=k)
        at_least(3, num_graphs=num_graphs)
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers, seed=seed)
        held_out(val_fraction=val_fraction, test_fraction=test_fraction)
        choice(("permutation", "independent"), values=values)
        self.k = k
        self.values = values
        self.num_graphs = num_graphs
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.sets: dict[str, LookupGraphs] = {}

    def setup(self, stage: str | None = None) -> None:
        """Draw the values and split them, once."""
        if self.sets:
            return
        draw = distinct_permutations if self.values == "permutation" else distinct_values
        values = draw(self.k, self.num_graphs, self.seed)
        count = len(values)
        val, test = (max(1, round(count * f)) for f in (self.val_fraction, self.test_fraction))
        if count <= val + test:
            raise UserError(f"data.k: {self.k} has {count} graphs, too few for three splits")
        parts = values.split([count - val - test, val, test])
        self.sets = {name: LookupGraphs(p, name) for name, p in zip(SPLITS, parts, strict=True)}

    def true_edges(self, graph: Data, index: int) -> Tensor | None:
        """Return which edge comes from a query's own key, in a graph or a batch of graphs.

        Returns:
            bool [edges], true for one edge; None if the node is a key.
        """
        attribute = graph.x[:, : self.k].argmax(dim=1)
        source, target = graph.edge_index
        right = (target == index) & (attribute[source] == attribute[index])
        return right if right.any() else None

    @property
    def num_classes(self) -> int:
        return self.k

    @property
    def class_names(self) -> list[str]:
        return [str(value) for value in range(self.k)]

    @property
    def in_channels(self) -> int:
        """Number of features: k attributes, "no value" and k values."""
        return 2 * self.k + 1

    def describe(self) -> dict[str, Any]:
        """Return the facts that a model and `NodeClassification` need, as plain values."""
        return {
            "in_channels": self.in_channels,
            "out_channels": self.num_classes,  # what PyG's models call it
            "num_classes": self.num_classes,
            "class_names": self.class_names,
        }

    def __str__(self) -> str:
        counts = " / ".join(f"{len(graphs):,}" for graphs in self.sets.values()) or "not set up"
        return (
            f"DictionaryLookupData: {self.k} keys and queries, {self.k**2} edges (directed); "
            f"graphs to train, validate, test: {counts}"
        )

    def loader(self, split: str) -> DataLoader:
        return make_loader(self, self.sets[split], split, "graphs")


class LookupGraphs(BatchItems):
    """Data set of DictionaryLookup graphs with these values [graphs, k], fetched by the batch."""

    def __init__(self, values: Tensor, split: str) -> None:
        self.values = values
        self.split = split

    def __len__(self) -> int:
        return len(self.values)

    def __getitems__(self, numbers: Sequence[int]) -> Data:
        values = self.values[torch.as_tensor(numbers)]
        graphs, k = values.shape
        attributes = torch.arange(k).repeat(2).expand(graphs, -1)
        shown = torch.cat([torch.zeros_like(values), values + 1], dim=1)  # 0: no value
        x = torch.cat([F.one_hot(attributes, k), F.one_hot(shown, k + 1)], dim=2)
        edges = torch.stack(
            [torch.arange(k, 2 * k).repeat_interleave(k), torch.arange(k).repeat(k)]
        )
        starts = torch.arange(graphs) * 2 * k
        queries = (torch.arange(2 * k) < k).repeat(graphs)
        nobody = torch.zeros_like(queries)
        return Data(
            x=x.flatten(0, 1).float(),
            y=values.repeat(1, 2).flatten(),
            edge_index=(edges[:, None] + starts[:, None]).flatten(1),
            batch=torch.arange(graphs).repeat_interleave(2 * k),
            ptr=torch.arange(graphs + 1) * 2 * k,
            **{f"{name}_mask": queries if name == self.split else nobody for name in SPLITS},
        )


def distinct_permutations(k: int, count: int, seed: int) -> Tensor:
    """Return `count` different permutations of 0 … k − 1 in random order, or all of them."""
    return _distinct(
        lambda draws, generator: torch.rand((draws, k), generator=generator).argsort(dim=1),
        min(count, math.factorial(k)),
        seed,
    )


def distinct_values(k: int, count: int, seed: int) -> Tensor:
    """Return `count` different rows of k values from 0 … k − 1, or all of them."""
    return _distinct(
        lambda draws, generator: torch.randint(k, (draws, k), generator=generator),
        min(count, k**k),
        seed,
    )


def _distinct(draw: Callable[[int, torch.Generator], Tensor], count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = draw(2 * count, generator).unique(dim=0)
    while len(found) < count:
        found = torch.cat([found, draw(2 * count, generator)]).unique(dim=0)
    return found[torch.randperm(len(found), generator=generator)[:count]]
