"""DictionaryLookup and infection: what their graphs ask, the true edges, and who can answer."""

import math

import networkx as nx
import pytest
import torch
from lightning import seed_everything
from made_graphs import CONSTANT
from task_support import quiet
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import GATConv, GATv2Conv
from torch_geometric.nn import SGFormer as PyGSGFormer

import attnkit
from attnkit.lightning import UserError
from attnkit.tasks.graphs import DictionaryLookupData, InfectionData, NodeClassification
from attnkit.tasks.graphs.datasets.synthetic import distinct_permutations, shortest_paths


def ready(k=5, **options):
    data = DictionaryLookupData(k, **options)
    data.setup()
    return data


def test_a_graph_asks_for_the_value_of_each_key():
    data = ready(k=5)
    permutation = data.sets["train"].values[3]
    graph = data.sets["train"][3]
    attribute = graph.x[:, :5].argmax(dim=1)
    shown = graph.x[:, 5:].argmax(dim=1)
    assert graph.x.sum(dim=1).tolist() == [2.0] * 10
    assert attribute.tolist() == [0, 1, 2, 3, 4] * 2
    assert shown.tolist() == [0] * 5 + (permutation + 1).tolist()
    assert graph.train_mask.tolist() == [True] * 5 + [False] * 5
    assert not graph.val_mask.any()
    assert not graph.test_mask.any()
    for query in range(5):
        sources = graph.edge_index[0, graph.edge_index[1] == query]
        assert sorted(sources.tolist()) == [5, 6, 7, 8, 9]
        key = sources[attribute[sources] == attribute[query]]
        assert shown[key] - 1 == graph.y[query]
    assert graph.edge_index.shape == (2, 25)


def test_a_batch_is_pygs_batch_of_its_graphs():
    graphs = ready(k=3, num_graphs=6).sets["train"]
    ours = graphs.__getitems__([2, 0, 1])
    theirs = Batch.from_data_list([graphs[number] for number in (2, 0, 1)])
    for name in ("x", "y", "edge_index", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(ours.batch, torch.arange(3).repeat_interleave(6))
    assert torch.equal(ours.ptr, torch.tensor([0, 6, 12, 18]))


@pytest.mark.parametrize("kind", ["GraphTransformer", "SGFormer", "Polynormer", "PyG's SGFormer"])
def test_global_attention_stays_in_its_graph(kind):
    graphs = ready(k=3, num_graphs=6).sets["train"]
    make = PyGSGFormer if kind.startswith("PyG") else getattr(attnkit, kind)
    module = NodeClassification(make(7, 8, 3), num_classes=3).eval()
    together, other = graphs.__getitems__([2, 0, 1]), graphs.__getitems__([0, 3])
    logits = module.logits(together), module.logits(other)
    torch.testing.assert_close(logits[0][6:12], logits[1][:6])


def test_combinations_of_the_test_are_unseen():
    data = ready(k=7, num_graphs=1000)
    sizes = [len(data.sets[name]) for name in ("train", "val", "test")]
    assert sizes == [800, 100, 100]
    seen = [tuple(p) for name in data.sets for p in data.sets[name].values.tolist()]
    assert len(set(seen)) == 1000
    assert all(sorted(p) == list(range(7)) for p in seen)


def test_permutations_are_all_or_as_many_as_asked_for():
    assert len(distinct_permutations(4, 1000, seed=0)) == math.factorial(4)
    many = distinct_permutations(30, 500, seed=1)
    assert many.shape == (500, 30)
    assert torch.equal(many, distinct_permutations(30, 500, seed=1))
    assert not torch.equal(many, distinct_permutations(30, 500, seed=2))
    first = torch.bincount(distinct_permutations(5, 60, seed=3)[:, 0], minlength=5)
    assert first.min() >= 6  # of 60 of 120, every value should lead about 12


def test_independent_values_say_nothing_of_each_other():
    data = ready(k=4, values="independent", num_graphs=10_000)
    found = torch.cat([data.sets[name].values for name in ("train", "val", "test")])
    assert len(found) == len(found.unique(dim=0)) == 4**4  # all there are, each in one split
    assert len(data.sets["test"]) == 26
    many = ready(k=9, values="independent", num_graphs=900).sets["train"].values
    assert many.min() == 0
    assert many.max() == 8
    assert min(len(row.unique()) for row in many) < 9
    graph = ready(k=9, values="independent").sets["test"][3]
    values = graph.x[9:, 9:].argmax(dim=1) - 1
    assert graph.y[:9].tolist() == values.tolist()


@pytest.mark.parametrize("values", ["permutation", "independent"])
def test_the_true_edge_comes_from_the_key_whose_value_is_asked_for(values):
    data = ready(k=4, values=values)
    batch = data.sets["test"].__getitems__([1, 0])
    for query in batch.test_mask.nonzero()[:, 0].tolist():
        true = data.true_edges(batch, query)
        source, target = batch.edge_index[:, true]
        assert target.tolist() == [query]
        assert source.tolist() == [query + 4]
        assert batch.y[source] == batch.y[query]
    assert data.true_edges(batch, 4) is None  # a key


class OneLayer(nn.Module):
    def __init__(self, convolution, in_channels, num_classes, dim=32):
        super().__init__()
        self.embed = nn.Linear(in_channels, dim)
        self.attention = convolution(dim, dim, add_self_loops=False)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x, edge_index):
        return self.head(self.attention(self.embed(x).relu(), edge_index))


def accuracy(convolution, folder):
    seed_everything(1, verbose=False)
    data = ready(k=4, batch_size=8)
    model = OneLayer(convolution, data.in_channels, data.num_classes)
    optimizer = {"_target_": "torch.optim.Adam", "lr": 0.01}
    task = NodeClassification(model, optimizer, CONSTANT, num_classes=data.num_classes)
    trainer = quiet(folder, max_epochs=60, check_val_every_n_epoch=60)
    trainer.fit(task, datamodule=data)
    assert trainer.callback_metrics["val/loss"] > 0
    return trainer.test(task, datamodule=data, verbose=False)[0]["test/accuracy"]


def test_gatv2_can_and_gat_cannot(tmp_path):
    """The claim the data was made for, on a small one."""
    assert accuracy(GATv2Conv, tmp_path) > 0.95
    assert accuracy(GATConv, tmp_path) < 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 1}, "k: expected at least 2, got 1"),
        ({"num_graphs": 2}, "num_graphs: expected at least 3"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"num_workers": -1}, "num_workers: expected at least 0"),
        ({"seed": -1}, "seed: expected at least 0"),
        ({"values": "free"}, "values: expected 'permutation' or 'independent', got 'free'"),
        ({"val_fraction": 0.0}, "val_fraction, test_fraction: expected above 0"),
    ],
)
def test_wrong_arguments_of_lookups_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DictionaryLookupData(**options)


def test_too_few_permutations_are_named():
    with pytest.raises(UserError, match=r"data.k: 2 has 2 graphs, too few"):
        ready(k=2)


def infected(**options):
    data = InfectionData(**options)
    data.setup()
    return data


@pytest.fixture(scope="module")
def small():
    return infected(num_nodes=150, mean_degree=2.5, num_infected=9, max_distance=3, seed=4)


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
    same, other = (infected(num_nodes=150, num_infected=9, seed=seed).graph for seed in (5, 6))
    assert torch.equal(infected(num_nodes=150, num_infected=9, seed=5).graph.x, same.x)
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
def test_wrong_arguments_of_infection_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        InfectionData(**options)
