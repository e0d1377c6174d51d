"""Reports of nodes and of whole graphs: rows, sections and what is said."""

import numpy as np
import pytest
import torch
from torch_geometric.nn import GATv2Conv

from attnkit import GraphTransformer, explain
from attnkit.interpret.report import Report
from attnkit.lightning import Explained


@pytest.fixture
def graph():
    torch.manual_seed(0)
    x, edges = torch.randn(11, 7), torch.randint(11, (2, 60))
    return x, edges[:, edges[0] != edges[1]]


def gat(seed, classes=5):
    torch.manual_seed(seed)
    return GATv2Conv(7, classes, heads=3, concat=False, add_self_loops=False).eval()


def test_a_section_for_each_node_and_a_row_for_each_method(graph, tmp_path):
    model = gat(1)
    report = Report(methods=["attention", "occlusion"], nodes=[3, 4])
    found = report(Explained(model, graph), tmp_path)
    arrays = np.load(tmp_path / "maps.npz")
    assert [(row["node"], row["map"]) for row in found.rows] == [
        (node, method) for node in (3, 4) for method in ("attention", "occlusion")
    ]
    for row in found.rows:
        node, method = row["node"], row["map"]
        seen = explain(model, graph, method=method, index=node)
        np.testing.assert_allclose(arrays[f"edges_{node}_{method}"], seen.edges)
        fidelity = seen.fidelity()
        wanted = np.mean([one["plus"] for one in fidelity.rows])
        assert row["fidelity_plus"] == pytest.approx(wanted)
        assert row["verdict"] == fidelity.verdict
        said = [one for one in found.said if f"node {node}, {method} (p lost" in one]
        assert len(said) == 1
    assert [section["title"] for section in found.sections] == ["Node 3", "Node 4"]
    assert found.shown[0] == ["node", "map", "class", "p", "edges", "p lost", "random", "p left"]
    page = (tmp_path / "explain.html").read_text()
    assert page.count("<h2>") == 2
    assert "do not conclude" in page


def test_another_model_is_refused(graph, tmp_path):
    report = Report(method="occlusion", nodes=[3], against="elsewhere")
    with pytest.raises(ValueError, match="against: expected none for nodes, got 'elsewhere'"):
        report(Explained(gat(1), graph), tmp_path)
    report, first = Report(method="occlusion", nodes=[3]), Explained(gat(1), graph)
    with pytest.raises(ValueError, match="none for nodes; nodes of another model are"):
        report(first, tmp_path, against=Explained(gat(2), graph))


def some_graphs():
    torch.manual_seed(2)
    model = GraphTransformer(7, 12, 3, num_layers=1, heads=3, readout="graph").eval()
    edges = [torch.randint(size, (2, 3 * size)) for size in (5, 11, 7)]
    inputs = [(torch.randn(size, 7), one) for size, one in zip((5, 11, 7), edges, strict=True)]
    given = {"graphs": [4, 9, 2], "truth": torch.tensor([1, -1, 0]), "names": ["a", "b", "c"]}
    return Explained(model, inputs, class_names=["x", "y", "z"], **given)


def test_whole_graphs_are_explained_each_by_itself(tmp_path):
    given = some_graphs()
    report = Report(methods=["relevance", "occlusion"], graphs=[2, 9], trust="none")
    found = report(given, tmp_path)
    assert [(row["graph"], row["name"], row["map"], row["label"]) for row in found.rows] == [
        (2, "c", "relevance", "x"), (2, "c", "occlusion", "x"),
        (9, "b", "relevance", "not known"), (9, "b", "occlusion", "not known"),
    ]  # fmt: skip
    arrays = np.load(tmp_path / "maps.npz")
    assert arrays["graphs"].tolist() == [2, 9]
    for number, place in ((2, 2), (9, 1)):
        seen = explain(given.model, given.inputs[place], method="relevance")
        np.testing.assert_allclose(arrays[f"edges_{number}_relevance"], seen.edges)
        np.testing.assert_array_equal(arrays[f"edge_index_{number}"], seen.edge_index)
        row = next(row for row in found.rows if row["graph"] == number)
        assert row["predicted"] == given.class_names[int(seen.predicted)]
    first, second = found.sections
    assert (first["title"], second["title"]) == ("Graph 2, c", "Graph 9, b")
    assert first["headline"].endswith("; its class is x")
    assert first["table"][0] == ["edge", "value", "share"]
    # every edge and node is drawn, and none has a class
    assert len(first["says"]) == 3 * 7 + len(given.inputs[2][1].unique())
    assert first["says"][-1] == f"Node {int(given.inputs[2][1].max())}."
    assert found.shown[0][:3] == ["graph", "map", "class"]


def test_a_whole_graph_is_judged(tmp_path):
    given = some_graphs()
    report = Report(graphs=[4])
    report.check(given)
    assert report.methods == ["relevance"]
    assert "forwards of a graph" in report.cost(given)
    found = report(given, tmp_path)
    verdict = explain(given.model, given.inputs[0], method="relevance").fidelity().verdict
    assert found.rows[0]["verdict"] == verdict
    assert any("graph 4, relevance (" in one for one in found.said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": [4, 5]}, "graphs: expected some of 4, 9, 2, got 5"),
        ({"nodes": [1]}, r"nodes: expected none for graphs, got \[1\]; graphs are explained whole"),
        ({"layer": 0}, "layer: expected none for graphs"),
    ],
)
def test_what_graphs_do_not_have_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Report("occlusion", **options)(some_graphs(), tmp_path)


def test_graphs_are_none_of_nodes(graph, tmp_path):
    with pytest.raises(ValueError, match=r"graphs: expected none for nodes, got \[3\]; nodes are"):
        Report("occlusion", nodes=[1], graphs=[3])(Explained(gat(1), graph), tmp_path)
    with pytest.raises(ValueError, match="graphs: expected some, got none"):
        Report(graphs=[])
