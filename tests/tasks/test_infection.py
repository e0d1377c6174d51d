"""Infection: distances and paths against networkx, and what is not a truth."""

import networkx as nx
import pytest
import torch

from attnkit.tasks.graphs import InfectionData
from attnkit.tasks.graphs.datasets.synthetic import shortest_paths


def ready(**options):
    data = InfectionData(**options)
    data.setup()
    return data


@pytest.fixture(scope="module")
def small():
    return ready(num_nodes=150, mean_degree=2.5, num_infected=9, max_distance=3, seed=4)


def test_classes_are_distances_and_truths_are_unique_shortest_paths(small):
    graph = small.graph
    network = nx.DiGraph(graph.edge_index.T.tolist())
    network.add_nodes_from(range(150))
    infected = graph.x[:, 1].nonzero()[:, 0].tolist()
    distance, _ = nx.multi_source_dijkstra(network, infected)
    seen = {"one": 0, "several": 0, "none": 0}
    for node in range(150):
        length = distance.get(node, 99)
        assert graph.y[node] == min(length, 4)
        paths = [
            path
            for start in infected
            if nx.has_path(network, start, node)
            for path in nx.all_shortest_paths(network, start, node)
            if len(path) - 1 == length
        ]
        true = small.true_edges(graph, node)
        if length in (1, 2, 3) and len(paths) == 1:
            expected = set(zip(paths[0], paths[0][1:], strict=False))
            assert {tuple(edge) for edge in graph.edge_index[:, true].T.tolist()} == expected
            seen["one"] += 1
        else:
            assert true is None
            seen["several" if length in (1, 2, 3) else "none"] += 1
    assert min(seen.values()) >= 5


def test_the_graph_is_as_described_and_the_seeds(small):
    graph = small.graph
    assert (graph.num_nodes, graph.num_edges, int(graph.x[:, 1].sum())) == (150, 375, 9)
    assert graph.x.sum(dim=1).tolist() == [1.0] * 150
    assert not graph.has_self_loops()
    assert len(graph.edge_index.unique(dim=1)[0]) == 375
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert masks.sum(dim=1).tolist() == [75, 30, 45]
    assert masks.sum(dim=0).max() == 1
    assert small.class_names == ["0", "1", "2", "3", "4 or more"]
    assert small.describe()["num_classes"] == 5
    same, other = (ready(num_nodes=150, num_infected=9, seed=seed).graph for seed in (5, 6))
    assert torch.equal(ready(num_nodes=150, num_infected=9, seed=5).graph.x, same.x)
    assert not torch.equal(other.edge_index, same.edge_index)
    assert not torch.equal(other.x, same.x)


def test_two_ways_of_one_length_are_no_truth_and_nor_is_what_they_lead_to():
    edges = torch.tensor([[0, 0, 1, 2, 3, 0, 5], [1, 2, 3, 3, 4, 5, 6]])
    infected = torch.arange(7) == 0
    distance, last = shortest_paths(infected, edges, 3)
    assert distance.tolist() == [0, 1, 1, 2, 3, 1, 2]
    assert last.tolist() == [-1, 0, 1, -1, -1, 5, 6]
    assert shortest_paths(infected, edges, 2)[0].tolist() == [0, 1, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 1}, "num_nodes: expected at least 2"),
        ({"max_distance": 0}, "max_distance: expected at least 1"),
        ({"num_nodes": 10, "mean_degree": 12.0}, "mean_degree: expected above 0, at most 9"),
        ({"mean_degree": 0.0}, "mean_degree: expected above 0"),
        ({"num_infected": 2000}, "num_infected: expected 1 to 1999"),
        ({"val_fraction": 1.0}, "val_fraction, test_fraction"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        InfectionData(**options)
