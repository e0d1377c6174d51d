"""Sections of nodes: what they say without a script, and what a browser makes of them."""

import re

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import attnkit
from attnkit.interpret.report.edges import edge_section
from attnkit.interpret.report.page import write_page
from attnkit.lightning import Explained

NAMES = ["<b>sheep</b>", "goat"]
LABELS = torch.tensor([0, 1, 0, -1, 1, 0, 1, 0])
EDGES = torch.tensor([[1, 2, 3, 4, 4, 0, 1, 5], [0, 1, 0, 3, 1, 3, 1, 4]])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pyg.GATv2Conv(3, 4, 2)
        self.last = pyg.GATv2Conv(8, 2, 1)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


@pytest.fixture
def seen():
    torch.manual_seed(1)
    x = torch.randn(8, 3)
    return attnkit.explain(Two().eval(), (x, EDGES), method="relevance", index=0)


def section_of(seen, labels=LABELS, fidelity=True):
    graph = Explained(seen.model, None, truth=labels, class_names=NAMES)
    return edge_section("Node 0", seen, seen.fidelity() if fidelity else None, graph)


def html_of(section, tmp_path):
    return write_page(tmp_path / "page.html", [section], title="Nodes").read_text()


def test_what_edges_and_nodes_say(seen, tmp_path):
    section = section_of(seen)
    first = seen.top(1)[0]
    assert f"First: {first.source} → {first.target} (" in section["alt"]
    assert len(section["edges"]) == 7  # those that reach the node
    assert len(section["nodes"]) == 5
    says = [edge["says"] for edge in section["edges"]]
    (said,) = (one for one in says if one.startswith(f"{first.source} → {first.target}: "))
    assert float(said.split()[4].rstrip(",")) == pytest.approx(first.score, rel=0.01)
    assert f"{100 * first.share:.0f} % of all" in said
    of_nodes = [node["says"] for node in section["nodes"]]
    assert "Node 0, class <b>sheep</b>: the node that was asked for." in of_nodes
    assert "Node 3, class not known." in of_nodes
    assert section["fidelity"] == str(seen.fidelity())
    assert f"{100 * seen.share:.0f} %" in section["notes"][1]
    assert section["table"][1][0] == f"{first.source} → {first.target}"
    assert section_of(seen, labels=None)["table"][0][1] == "predicted class of its source"
    assert section_of(seen, fidelity=False)["curves"] == []
    with pytest.raises(ValueError, match="labels: expected a class for each"):
        section_of(seen, labels=LABELS[:2])
    html = html_of(section, tmp_path)
    assert "<b>sheep" not in html
    assert "&lt;b&gt;sheep" in html
    assert len(re.findall(r'data-says="', html)) == 7 + 5


def test_the_curve_of_fidelity_has_its_numbers_at_their_height(seen):
    fidelity = seen.fidelity(ks=[1, 4])
    graph = Explained(seen.model, None, truth=LABELS, class_names=NAMES)
    figures = edge_section("Node 0", seen, fidelity, graph)["curves"]
    for figure, name in zip(figures, ("plus", "minus"), strict=True):
        ranked = figure["lines"][-1]["points"]
        assert [x for x, _ in ranked] == [0, 1]
        wanted = [fidelity.probability - row[name] for row in fidelity.rows]
        assert [y for _, y in ranked] == pytest.approx(wanted)
        lows = [fidelity.probability - row[f"random_{name}_low"] for row in fidelity.rows]
        assert [y for _, y in figure["band"][:2]] == pytest.approx(lows)
        assert figure["ticks"] == [(0, "1"), (1, "4")]


def test_a_node_with_many_edges_takes_little_room(tmp_path):
    torch.manual_seed(1)
    x, edges = torch.randn(400, 3), torch.randint(400, (2, 9000))
    edges[1, :900] = 7
    seen = attnkit.explain(Two().eval(), (x, edges), method="attention", index=7)
    graph = Explained(seen.model, (x, edges))
    section = edge_section("Node 7", seen, seen.fidelity(ks=[1, 2], num_draws=2), graph)
    assert 10_000 < len(html_of(section, tmp_path)) < 150_000
    assert re.search(r"24 edges as wide as their value, .*\d+ not drawn", section["notes"][0])


def test_pointer_and_keys_say_what_an_edge_is(seen, tmp_path, open_page):
    html_of(section_of(seen), tmp_path)
    page = open_page(tmp_path / "page.html", viewport={"width": 1100, "height": 900})
    said, rows = page.locator(".said"), seen.top(3)
    assert said.text_content().startswith("Point at an edge or a node")
    page.locator(".ego").focus()
    assert said.text_content().startswith(f"{rows[0].source} → {rows[0].target}: relevance")
    page.keyboard.press("ArrowRight")
    assert said.text_content().startswith(f"{rows[1].source} → {rows[1].target}: relevance")
    page.keyboard.press("ArrowLeft")
    assert said.text_content().startswith(f"{rows[0].source} → {rows[0].target}: relevance")
    assert page.locator(".ego .chosen").count() == 1
    for _ in range(11):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")  # there is nothing behind the last
    assert said.text_content().startswith("Node 4, class goat")
    page.locator(".ego .node").nth(2).hover()
    assert said.text_content() == "Node 2, class <b>sheep</b>."
    box = page.locator(".graph").bounding_box()
    assert box["x"] + box["width"] <= 1100
