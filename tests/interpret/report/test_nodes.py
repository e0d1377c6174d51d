"""Reports of nodes: rows, sections and what is said."""

import numpy as np
import pytest
import torch
from torch_geometric.nn import GATv2Conv

from attnkit import explain
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
