"""What is drawn of a node: which edges, where, how wide; and the edges that rank first as rows."""

import math

import pytest
import torch
from PIL import Image
from torch import nn
from torch_geometric import nn as pyg

import attnkit
from attnkit.interpret.graph_picture import (
    CLASS_COLOURS,
    class_colours,
    draw_graph,
    ego_graph,
    empty_figure,
    legend,
)
from attnkit.interpret.methods.graph_question import steps_to

# 0 ← 1 ← 2, 0 ← 3 ← 4, 4 → 1, there and back between 0 and 3, a loop at 1; 5 → 4 is too far away
EDGES = torch.tensor([[1, 2, 3, 4, 4, 0, 1, 5], [0, 1, 0, 3, 1, 3, 1, 4]])
REACH = torch.tensor([True] * 7 + [False])


def drawn(scores, most=24, index=0):
    return ego_graph(torch.tensor(scores), EDGES, REACH, index, most)


def places(ego, ranked):
    return {edge.place for edge in ego.edges if bool(edge.width) == ranked}


def test_edges_are_as_wide_as_their_numbers_over_the_largest():
    ego = drawn([0.5, 2.0, -4.0, 1.0, 0.0, 0.25, 0.125, 9.0])
    widths = {edge.place: edge.width for edge in ego.edges}
    assert widths == {0: 0.125, 1: 0.5, 2: 1.0, 3: 0.25, 4: 0.0, 5: 0.0625, 6: 0.03125}
    assert (ego.largest, ego.num_ranked, ego.num_left_out) == (4.0, 6, 0)
    assert ego.edges[0].place == 2
    colours = {edge.place: edge.colour for edge in ego.edges}
    assert len({colours[0], colours[2], colours[4]}) == 3
    assert colours[0] == colours[1]
    assert str(ego) == "6 edges as wide as their value, 1 other in grey."


def test_what_is_far_is_drawn_with_a_way_to_the_node():
    ego = drawn([0.1, 3.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0], most=1)
    assert places(ego, ranked=True) == {1}  # 2 → 1
    assert places(ego, ranked=False) == {0, 6}  # 1 → 0, and between these nodes the loop
    assert [node.number for node in ego.nodes] == [0, 1, 2]
    assert ego.num_left_out == 4
    assert str(ego).endswith("2 others in grey, 4 not drawn.")
    chain = torch.tensor([[1, 2, 3, 4, 4], [0, 1, 2, 3, 1]])
    ego = ego_graph(torch.tensor([0.0, 0, 0, 1, 0]), chain, torch.ones(5).bool(), 0, most=1)
    assert [node.number for node in ego.nodes] == [0, 1, 2, 3, 4]
    ego = ego_graph(torch.tensor([0.0, 0, 0, 1]), chain[:, :4], torch.ones(4).bool(), 0, most=1)
    assert sorted(edge.place for edge in ego.edges) == [0, 1, 2, 3]  # the whole way


def arrows(ego):
    """The drawn nodes and arrows, by their names in an SVG."""
    figure = empty_figure(5, 5)
    panel = figure.subplots()
    draw_graph(panel, ego, [], [], method="given", classes_are="class")
    figure.canvas.draw()
    return {patch.get_gid(): patch for patch in panel.patches}


def test_nodes_lie_apart_and_edges_end_at_their_rims():
    ego = drawn([1.0] * 8)
    again = drawn([1.0] * 8)
    assert ego == again
    at = {node.number: (node.x, node.y) for node in ego.nodes}
    assert max(abs(c) for place in at.values() for c in place) == pytest.approx(1)
    pairs = [(a, b) for a in at for b in at if a < b]
    assert min(math.dist(at[a], at[b]) for a, b in pairs) > 2 * ego.radius
    patches = arrows(ego)
    for rank, node in enumerate(ego.nodes, len(ego.edges)):
        assert patches[f"rank{rank}"].center == at[node.number]
    middles = []
    for rank, edge in enumerate(ego.edges):
        points = patches[f"rank{rank}"].get_path().vertices
        for node in {edge.source, edge.target} if edge.source != edge.target else ():
            nearest = min(math.dist(point, at[node]) for point in points)
            assert nearest == pytest.approx(ego.radius, rel=0.1)
        if {edge.source, edge.target} == {0, 3}:
            middles.append(points.mean(axis=0))
    assert math.dist(*middles) > 0.1  # there and back lie apart


def test_arrows_are_as_wide_as_the_scale_says():
    ego = drawn([0.5, 2.0, -4.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert [edge.width for edge in ego.edges] == [1.0, 0.5, 0.25, 0.125, 0.0, 0.0, 0.0]
    patches = arrows(ego)
    widths = [patches[f"rank{rank}"].get_arrowstyle().tail_width for rank in range(5)]
    assert widths == pytest.approx([0.8 + 6.2 * width for width in (1, 0.5, 0.25, 0.125, 0)])
    assert patches["rank0"].zorder > patches["rank1"].zorder  # above all others


def test_nodes_that_no_edge_leads_from_are_drawn_too():
    """Where all nodes see each other, all edges count."""
    every = torch.ones(8).bool()
    ego = ego_graph(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 2.0]), EDGES.flip(0), every, 0)
    assert [node.number for node in ego.nodes] == list(range(6))
    assert -1 in steps_to(0, EDGES.flip(0)).tolist()


def test_colours_of_classes_agree_between_drawings_and_the_rest_is_named():
    assert class_colours([3, 1, 3, -1]) == {1: CLASS_COLOURS[1], 3: CLASS_COLOURS[3]}
    many = class_colours([40, 40, *range(30)])
    assert list(many)[:2] == [40, 0]
    assert len(many) == len(CLASS_COLOURS)
    assert [name for name, _ in legend(many, [*range(30), 40], [])][-1] == "another"
    named = legend(class_colours([0, 1]), [0, 1, -1], ["sheep", "goat"])
    assert [name for name, _ in named] == ["sheep", "goat", "not known"]


def test_steps_are_along_edges():
    assert steps_to(0, EDGES, 6).tolist() == [0, 1, 2, 1, 2, 3]
    assert steps_to(4, EDGES).tolist() == [-1, -1, -1, -1, 0, 1]
    assert steps_to(7, EDGES, 9).tolist() == [-1] * 7 + [0, -1]
    assert steps_to(None, EDGES).tolist() == [0] * 6


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pyg.GATv2Conv(3, 4, 2, add_self_loops=False)
        self.last = pyg.GATv2Conv(8, 2, 1, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


@pytest.fixture
def seen():
    torch.manual_seed(1)
    return attnkit.explain(Two().eval(), (torch.randn(6, 3), EDGES), method="occlusion", index=0)


def test_rows_of_the_edges_that_rank_first(seen):
    rows = seen.top(3)
    best = seen.edges[:7].argsort(descending=True)[:3]
    assert [(row.source, row.target) for row in rows] == list(map(tuple, EDGES[:, best].T.tolist()))
    assert [row.score for row in rows] == seen.edges[best].tolist()
    assert rows[0].share == pytest.approx(float(seen.edges[best[0]].abs() / seen.edges.abs().sum()))
    steps = [0, 1, 2, 1, 2, 3]
    assert [row.steps for row in rows] == [steps[row.source] for row in rows]
    assert len(seen.top(100)) == 7  # those that can reach the node
    with pytest.raises(ValueError, match="k: expected at least 1, got 0"):
        seen.top(0)


def test_the_picture_is_written(seen, tmp_path):
    picture = Image.open(seen.save(tmp_path / "seen.png", class_names=["a", "$b"]))
    assert picture.size[0] > 1000
    labels = torch.tensor([0, 1, -1, 0, 1, 1])
    text = seen.save(tmp_path / "seen.svg", labels=labels, most=2).read_text()
    assert text.count("<path") > 20
    with pytest.raises(ValueError, match=r"labels: expected a class for each of at least 6 nodes"):
        seen.save(tmp_path / "wrong.png", labels=labels[:4])
    with pytest.raises(ValueError, match="most: expected at least 1, got 0"):
        seen.save(tmp_path / "wrong.png", most=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["seen.png", "seen.svg"]


def test_what_is_asked_of_a_part_of_the_graph_is_what_the_whole_says():
    """A graph of which few nodes reach the one that is asked for, and a model with a norm over all
    nodes, for which a part is not enough."""
    torch.manual_seed(2)
    x, edges = torch.randn(200, 3), torch.randint(200, (2, 260))
    index = int(edges[1].mode().values)

    class Normed(Two):
        def forward(self, x, edge_index):
            return super().forward(x - x.mean(dim=0), edge_index)

    for model, has_part in ((Two().eval(), True), (Normed().eval(), False)):
        seen = attnkit.explain(model, (x, edges), method="occlusion", index=index)
        assert (seen.unit.target.part is not None) == has_part
        whole = model(x, edges)[index, seen.target]
        for edge in seen.candidates.nonzero()[:, 0].tolist():
            kept = torch.arange(260) != edge
            left = model(x, edges[:, kept])[index, seen.target]
            assert float(seen.edges[edge]) == pytest.approx((whole - left).item(), abs=1e-5)
        assert seen.edges.abs().max() > 0.01
