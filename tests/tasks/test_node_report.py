"""What a test and a prediction of nodes leave, against PyG, scikit-learn and plain loops."""

import csv

import pytest
import torch
from made_graphs import RandomGraph, ready
from PIL import Image
from sklearn.metrics import accuracy_score
from task_support import quiet
from torch import nn
from torch_geometric.nn import GAT, GCN
from torch_geometric.utils import contains_self_loops, homophily, remove_self_loops

import attnkit
from attnkit.lightning import UserError
from attnkit.lightning.callbacks.results import PredictionsFile
from attnkit.tasks.graphs import (
    NodeClassification,
    NodePredictions,
    NodeReport,
)
from attnkit.tasks.graphs.node_attention import largest_of_each
from attnkit.tasks.graphs.node_report import (
    NeighbourhoodScores,
    in_degrees,
    label_homophily,
)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_degrees_and_homophily_are_those_of_pyg_and_of_a_loop():
    graph = ready().graph
    edge_index, y = graph.edge_index, graph.y.clone()
    assert contains_self_loops(edge_index)
    y[:11] = -1  # without a label
    degrees, shares = in_degrees(edge_index, 97), label_homophily(edge_index, y)
    for node in range(97):
        neighbours = [s for s, t in edge_index.T.tolist() if t == node and s != node]
        assert degrees[node] == len(neighbours)
        labels = [int(y[s]) for s in neighbours if y[s] >= 0]
        if labels:
            assert shares[node] == pytest.approx(labels.count(int(y[node])) / len(labels))
        else:
            assert shares[node].isnan()
    plain, _ = remove_self_loops(edge_index)
    theirs = homophily(plain, graph.y, method="node")  # a node without edges counts as 0 there
    ours = label_homophily(edge_index, graph.y).nan_to_num(0.0).mean()
    assert float(ours) == pytest.approx(theirs)


def test_groups_by_degree_double_and_those_by_homophily_are_fifths():
    degrees = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9, 16, 17])
    shares = torch.tensor([float("nan"), 0.0, 0.19, 0.2, 0.4, 0.6, 0.79, 0.8, 0.99, 1.0])
    right = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0, 0, 0]).bool()
    labels = torch.tensor([0, 0, 1, 1, 2, 1, 1, 2, 0, 0])
    scores = NeighbourhoodScores(3)
    scores.update(right[:4], labels[:4], degrees[:4], shares[:4])
    scores.update(right[4:], labels[4:], degrees[4:], shares[4:])
    rows = scores.compute()
    nodes = {(row.by, row.group): row.nodes for row in rows}
    assert nodes == {
        ("degree", "0"): 1, ("degree", "1"): 1, ("degree", "2"): 1, ("degree", "3–4"): 2,
        ("degree", "5–8"): 2, ("degree", "9–16"): 2, ("degree", "17–32"): 1,
        ("homophily", "0–0.2"): 2, ("homophily", "0.2–0.4"): 1, ("homophily", "0.4–0.6"): 1,
        ("homophily", "0.6–0.8"): 2, ("homophily", "0.8–1"): 3, ("homophily", "none"): 1,
    }  # fmt: skip
    found = {(row.by, row.group): row for row in rows}
    assert found["degree", "3–4"].accuracy == 0.5
    assert found["homophily", "0.8–1"].largest_class == pytest.approx(2 / 3)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_test_leaves_tables_and_pictures(tmp_path, batch_size):
    torch.manual_seed(3)
    data = ready(batch_size=batch_size, num_neighbors=[-1, -1])
    model = attnkit.GAT(5, 16, 7, heads=4, score="gatv2")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    task = NodeClassification(model, num_classes=7)
    quiet(tmp_path, callbacks=[NodeReport(tmp_path)]).test(task, datamodule=data, verbose=False)

    graph = data.graph
    with torch.no_grad():
        predicted = model.eval()(graph.x, graph.edge_index).argmax(dim=1)
    degrees = in_degrees(graph.edge_index, 97)
    by_degree = {row["group"]: row for row in read(tmp_path / "accuracy_by_neighbourhood.csv")
                 if row["by"] == "degree"}  # fmt: skip
    assert sum(int(row["nodes"]) for row in by_degree.values()) == 29
    for group, (low, high) in {"2": (2, 2), "3–4": (3, 4), "5–8": (5, 8)}.items():
        mask = graph.test_mask & (low <= degrees) & (degrees <= high)
        expected = accuracy_score(graph.y[mask], predicted[mask])
        assert float(by_degree[group]["accuracy"]) == pytest.approx(expected, abs=1e-6)
        assert int(by_degree[group]["nodes"]) == mask.sum()

    rows = read(tmp_path / "attention_entropy.csv")
    assert [(row["layer"], int(row["head"])) for row in rows] == [
        *(("layers.0.attention", head) for head in range(4)), ("layers.1.attention", 0)
    ]  # fmt: skip
    if batch_size is None:  # else of the first sub-graph
        theirs = attnkit.diagnose_attention(model, (graph.x, graph.edge_index)).rows
        for row, other in zip(rows, theirs, strict=True):
            assert float(row["entropy"]) == pytest.approx(other["entropy"], abs=1e-5)
            assert float(row["uniform"]) == pytest.approx(other["uniform"], abs=1e-5)
            known = other["entropy_by_degree"]["5–8"]
            assert float(row["entropy at 5–8"]) == pytest.approx(known, abs=1e-5)
    for name in ("accuracy_by_neighbourhood", "attention_entropy"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert min(picture.size) > 300


def test_a_model_without_attention_leaves_accuracies_alone(tmp_path, capsys):
    data = ready()
    task = NodeClassification(GCN(5, 7, 2, 7), num_classes=7)
    quiet(tmp_path, callbacks=[NodeReport(tmp_path)]).test(task, datamodule=data, verbose=False)
    assert (tmp_path / "accuracy_by_neighbourhood.png").is_file()
    assert not (tmp_path / "attention_entropy.csv").exists()
    assert "no attention_entropy.csv" in capsys.readouterr().out
    asked = NodePredictions(tmp_path, attention=True)
    with pytest.raises(UserError, match=r"predict.attention: .*no attention"):
        quiet(tmp_path, callbacks=[asked]).predict(task, datamodule=data)


@pytest.mark.parametrize("heads", ["mean", "each"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_prediction_names_the_edges_looked_at_most(tmp_path, batch_size, heads):
    """Against the weights that PyG's layers return."""
    data = ready(batch_size=batch_size, num_neighbors=[-1, -1])
    data.node_names = [f"node {number}" for number in range(97)]
    model = GAT(5, 12, num_layers=2, out_channels=7, heads=3, add_self_loops=False)
    task = NodeClassification(model, num_classes=7, class_names=data.class_names).eval()
    callbacks = [
        NodePredictions(tmp_path, attention=True, top_k=3, heads=heads),
        PredictionsFile(tmp_path / "predictions.csv"),
    ]
    quiet(tmp_path, callbacks=callbacks).predict(task, datamodule=data)
    first = read(tmp_path / "predictions.csv")[13]
    assert list(first)[:4] == ["node", "name", "label", "probability"]
    assert (first["node"], first["name"]) == ("13", "node 13")
    assert sum(float(first[f"p({name})"]) for name in "abcdefg") == pytest.approx(1, abs=1e-5)

    rows = read(tmp_path / "attention.csv")
    assert list(rows[0]) == [
        "node", "name", "layer", "head", "source", "source_name", "weight"
    ]  # fmt: skip
    assert [int(row["node"]) for row in rows] == sorted(int(row["node"]) for row in rows)
    assert all(row["source_name"] == f"node {row['source']}" for row in rows)
    graph, x = data.graph, data.graph.x
    for number, layer in enumerate(task.model.convs):
        with torch.no_grad():
            x, (edges, weights) = layer(x, graph.edge_index, return_attention_weights=True)
            x = x.relu()
        names = {"mean": weights.mean(dim=1)}
        if heads == "each":
            names = {str(head): weights[:, head] for head in range(weights.shape[1])}
        for head, weight in names.items():
            for node in (0, 13, 41):
                expected = weight[edges[1] == node].sort(descending=True).values[:3]
                found = [row for row in rows if row["layer"] == f"convs.{number}"]
                found = [r for r in found if r["node"] == str(node) and r["head"] == head]
                values = torch.tensor([float(row["weight"]) for row in found])
                torch.testing.assert_close(values, expected, atol=2e-6, rtol=0)
                for row in found:
                    own = (edges[1] == node) & (edges[0] == int(row["source"]))
                    assert (weight[own] - float(row["weight"])).abs().min() < 2e-6


def test_the_largest_of_each_target_are_those_of_sorting():
    torch.manual_seed(1)
    target, weight = torch.randint(0, 7, (53,)), torch.rand(53).round(decimals=1)
    places = largest_of_each(target, weight, 3).tolist()
    expected = []
    for node in range(7):
        own = [place for place in range(53) if target[place] == node]
        expected += sorted(own, key=lambda place: (-float(weight[place]), place))[:3]
    assert places == expected


def test_names_of_another_number_are_refused():
    data = RandomGraph()
    data.node_names = ["a", "b"]
    with pytest.raises(UserError, match="expected 97 node_names, one for each node, got 2"):
        data.setup()
