"""Sections of nodes: what they say without a script, and what a browser makes of them."""

import re

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import attnkit
from attnkit.interpret.page.graphs import graph_section
from attnkit.interpret.page.page import write_page
from attnkit.interpret.page.section import Table

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


def section_of(seen, labels=LABELS):
    return graph_section("Node 0", seen, seen.fidelity(), NAMES, labels)


def test_all_is_said_without_a_script(seen):
    html = section_of(seen).html
    assert "<b>sheep" not in html
    assert "&lt;b&gt;sheep" in html
    first = seen.top(1)[0]
    assert f"First: {first.source} → {first.target} (" in re.search(r'aria-label="(.*?)"', html)[1]
    titles = re.findall(r"<title>(.*?)</title>", html)
    assert len(titles) == 7 + 5  # the edges that reach the node, and their ends; the loop is one
    (said,) = (one for one in titles if one.startswith(f"{first.source} → {first.target}: "))
    assert float(said.split()[4].rstrip(",")) == pytest.approx(first.score, rel=0.01)
    assert f"{first.share:.0%} of all" in said
    assert "Node 0, class &lt;b&gt;sheep&lt;/b&gt;: the node that was asked for." in titles
    assert "Node 3, class not known." in titles
    assert str(seen.fidelity()).split(". ")[0] in html
    assert f"{seen.share:.0%}" in html
    row = re.search(r"<tbody><tr>(.*?)</tr>", html)[1]
    assert f"<td>{first.source} → {first.target}</td>" in row
    predicted = section_of(seen, labels=None).html
    assert "predicted class" in predicted
    bare = graph_section("Node 0", seen).html
    assert "fidelity" not in bare
    with pytest.raises(ValueError, match="labels: expected a class for each"):
        section_of(seen, labels=LABELS[:2])


def test_the_curve_of_fidelity_has_its_numbers_at_their_height(seen):
    fidelity = seen.fidelity(ks=[1, 4])
    html = graph_section("Node 0", seen, fidelity).html
    paths = re.findall(r'class="ranked" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', html)
    ticks = [float(y) for y in re.findall(r'class="grid" d="M34 ([\d.]+)H', html)[:3]]
    for path, name in zip(paths, ("plus", "minus"), strict=True):
        for y, row in zip(path[1::2], fidelity.rows, strict=True):
            p = (ticks[0] - float(y)) / (ticks[0] - ticks[2])
            assert p == pytest.approx(fidelity.probability - row[name], abs=0.01)
        assert float(path[0]) < float(path[2])


def test_a_node_with_many_edges_takes_little_room():
    torch.manual_seed(1)
    x, edges = torch.randn(400, 3), torch.randint(400, (2, 9000))
    edges[1, :900] = 7
    seen = attnkit.explain(Two().eval(), (x, edges), method="attention", index=7)
    section = graph_section("Node 7", seen, seen.fidelity(ks=[1, 2], num_draws=2))
    assert 10_000 < len(section.html.encode()) < 150_000
    assert re.search(r"24 edges as wide as their value, .*\d+ not drawn", section.html)


def test_pointer_and_keys_say_what_an_edge_is(seen, tmp_path, open_page):
    section = section_of(seen)
    file = tmp_path / "page.html"
    write_page(file, title="Nodes", facts=[], table=Table([], []), sections=[section])
    page = open_page(file, viewport={"width": 1100, "height": 900})
    said, rows = page.locator(".said"), seen.top(3)
    assert said.text_content().startswith("Point at an edge or a node")
    page.locator(".ego").focus()
    assert said.text_content().startswith(f"{rows[0].source} → {rows[0].target}: relevance")
    page.keyboard.press("ArrowRight")
    assert said.text_content().startswith(f"{rows[1].source} → {rows[1].target}: relevance")
    page.keyboard.press("ArrowLeft")
    assert said.text_content().startswith(f"{rows[0].source} → {rows[0].target}: relevance")
    assert page.locator(".ego .chosen").count() == 1
    page.keyboard.press("End")
    assert said.text_content().startswith("Node 4, class goat")
    page.locator(".ego .node").nth(2).hover()
    assert said.text_content() == "Node 2, class <b>sheep</b>."
    box = page.locator(".graph").bounding_box()
    assert box["x"] + box["width"] <= 1100
