"""Sections of nodes: what they say without a script, and what a browser makes of them."""

import html
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


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(1)
    x = torch.randn(8, 3)
    return attnkit.explain(Two().eval(), (x, EDGES), method="relevance", index=0)


def section_of(seen, fidelity, labels=LABELS):
    graph = Explained(seen.model, None, truth=labels, class_names=NAMES)
    return edge_section("Node 0", seen, fidelity, graph)


@pytest.fixture(scope="module")
def section(seen):
    return section_of(seen, seen.fidelity())


def html_of(section, tmp_path):
    return write_page(tmp_path / "page.html", [section], title="Nodes").read_text()


def test_what_edges_and_nodes_say(seen, section, tmp_path):
    first = seen.top(1)[0]
    assert f"First: {first.source} → {first.target} (" in section["alt"]
    says = section["says"]
    assert len(says) == 7 + 5  # the edges that reach the node, and their nodes
    (said,) = (one for one in says if one.startswith(f"{first.source} → {first.target}: "))
    assert float(said.split()[4].rstrip(",")) == pytest.approx(first.score, rel=0.01)
    assert f"{100 * first.share:.0f} % of all" in said
    assert "Node 0, class <b>sheep</b>: the node that was asked for." in says
    assert "Node 3, class not known." in says
    assert section["fidelity"] == str(seen.fidelity())
    assert f"{100 * seen.share:.0f} %" in section["notes"][0]
    assert section["table"][1][0] == f"{first.source} → {first.target}"
    less = section_of(seen, None, labels=None)
    assert less["table"][0][1] == "predicted class of its source"
    assert less["curves"] is None
    with pytest.raises(ValueError, match="labels: expected a class for each"):
        section_of(seen, None, labels=LABELS[:2])
    text = html_of(section, tmp_path)
    assert "<b>sheep" not in text
    assert "&lt;b&gt;sheep" in text
    ranks = map(int, re.findall(r'data-rank="(\d+)"', text))
    assert sorted(ranks) == list(range(7 + 5))
    assert not re.search("#c2410c|#2166ac|#000000", section["drawing"])  # the page's own colours


def test_the_curves_of_fidelity_are_in_words_too(seen):
    fidelity = seen.fidelity(ks=[1, 4])
    graph = Explained(seen.model, None, truth=LABELS, class_names=NAMES)
    curves = edge_section("Node 0", seen, fidelity, graph)["curves"]
    name = NAMES[int(seen.target)]
    assert curves["alt"].startswith(f"p({name}) with all edges is {fidelity.probability:.2f}; ")
    for row, kind in ((fidelity.rows[0], "plus"), (fidelity.rows[1], "minus")):
        left = f"{fidelity.probability - row[kind]:.2f} at k = {row['k']:g}"
        assert left in curves["alt"]
    drawing = html.unescape(curves["drawing"])
    assert all(text in drawing for text in (f">p({name})<", ">k, edges<", ">20 random orders<"))


def test_a_node_with_many_edges_takes_little_room(tmp_path):
    torch.manual_seed(1)
    x, edges = torch.randn(400, 3), torch.randint(400, (2, 9000))
    edges[1, :900] = 7
    seen = attnkit.explain(Two().eval(), (x, edges), method="attention", index=7)
    graph = Explained(seen.model, (x, edges))
    section = edge_section("Node 7", seen, seen.fidelity(ks=[1, 2], num_draws=2), graph)
    assert 10_000 < len(html_of(section, tmp_path)) < 150_000
    assert re.search(r"24 edges as wide as their value, .*\d+ not drawn", section["alt"])


def test_pointer_and_keys_say_what_an_edge_is(seen, section, tmp_path, open_page):
    html_of(section, tmp_path)
    page = open_page(tmp_path / "page.html", viewport={"width": 1100, "height": 900})
    said, rows = page.locator(".said"), seen.top(3)
    assert said.text_content().startswith("Point at an edge or a node")
    page.locator(".choose").focus()
    assert said.text_content().startswith(f"{rows[0].source} → {rows[0].target}: relevance")
    page.keyboard.press("ArrowRight")
    assert said.text_content().startswith(f"{rows[1].source} → {rows[1].target}: relevance")
    page.keyboard.press("ArrowLeft")
    assert said.text_content().startswith(f"{rows[0].source} → {rows[0].target}: relevance")
    assert page.locator(".drawing .chosen").count() == 1
    for _ in range(11):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")  # there is nothing behind the last
    assert said.text_content().startswith("Node 4, class goat")
    page.locator("[data-rank='9']").hover()
    assert said.text_content() == "Node 2, class <b>sheep</b>."
    box = page.locator(".graph").bounding_box()
    assert box["x"] + box["width"] <= 1100
