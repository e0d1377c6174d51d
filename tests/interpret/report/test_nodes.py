"""Reports of nodes: another model of the same graph beside the first."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
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


def test_another_model_is_asked_for_the_same_class(graph, tmp_path):
    first, second = gat(1), gat(2)
    report = Report(methods=["attention", "occlusion"], trust="none", nodes=[3, 4])
    found = report(Explained(first, graph), tmp_path, against=Explained(second, graph))
    arrays = np.load(tmp_path / "maps.npz")
    for row in found.rows:
        node, method = row["node"], row["map"]
        ours = explain(first, graph, method=method, index=node)
        target = ours.target if method == "occlusion" else None
        theirs = explain(second, graph, target, method, index=node)
        np.testing.assert_allclose(arrays[f"against_{node}_{method}"], theirs.edges)
        wanted = spearmanr(ours.edges[ours.candidates], theirs.edges[ours.candidates]).statistic
        assert row["spearman_against"] == pytest.approx(wanted, abs=1e-5)
        assert abs(wanted) < 0.999
    assert found.shown[0][-1] == "other\nmodel"
    titles = ["Node 3", "Node 3, by the other checkpoint", "Node 4"]
    assert [section.title for section in found.sections][:3] == titles
    page = (tmp_path / "explain.html").read_text()
    assert page.count("<h2>") == 4


def test_another_graph_is_refused(graph, tmp_path):
    x, edges = graph
    report = Report(method="occlusion", trust="none", nodes=[3])
    with pytest.raises(ValueError, match="against: expected a model of the same graph, got one of"):
        report(Explained(gat(1), graph), tmp_path, against=Explained(gat(2), (x, edges[:, 1:])))
