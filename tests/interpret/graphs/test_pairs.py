"""Edges that the answer of a pair of nodes depends on, against the model without each of them."""

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import attnkit

CHANNELS = 5


class Pairs(nn.Module):
    """Two layers, and the product of the vectors of two nodes."""

    def __init__(self, convolution=pyg.GATv2Conv):
        super().__init__()
        self.first = convolution(CHANNELS, 7)
        self.last = convolution(7, 3)

    def forward(self, x, edge_index, pairs):
        source, target = self.last(self.first(x, edge_index).tanh(), edge_index)[pairs]
        return (source * target).sum(dim=1, keepdim=True)


def a_graph(nodes, edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.randn(nodes, CHANNELS, generator=generator), edge_index


def lost(model, x, edges, pair):
    """What the logit loses without each edge."""
    pairs = torch.tensor(pair)[:, None]
    with torch.no_grad():
        whole = model(x, edges, pairs=pairs)[0, 0]
        keep = ~torch.eye(edges.shape[1], dtype=torch.bool)
        return whole - torch.stack([model(x, edges[:, one], pairs=pairs)[0, 0] for one in keep])


@pytest.mark.parametrize("nodes", [13, 211])  # a part of the larger graph is asked
def test_occlusion_is_what_the_score_loses_without_an_edge(nodes):
    torch.manual_seed(0)
    (x, edges), model, pair = a_graph(nodes, 3 * nodes // 2), Pairs().eval(), (4, 9)
    seen = attnkit.explain(model, (x, edges), method="occlusion", index=pair)
    expected = lost(model, x, edges, pair)
    torch.testing.assert_close(seen.edges, expected, atol=1e-5, rtol=1e-4)
    assert not expected[~seen.candidates].any()
    near = {*pair, *edges[0, torch.isin(edges[1], torch.tensor(pair))].tolist()}
    assert torch.equal(seen.candidates, torch.isin(edges[1], torch.tensor([*near])))
    assert (seen.unit.target._known_part is not None) == (nodes > 100)
    with torch.no_grad():
        score = model(x, edges, torch.tensor(pair)[:, None])[0, 0]
    assert float(seen.probability) == pytest.approx(float(score.sigmoid()), abs=1e-6)
    assert seen.index == pair
    assert seen.top(1)[0].steps in (0, 1, 2)
    assert any("edges reach the pair in 2 steps." in note for note in seen.notes)
    said = "An edge joins the pair in the graph, and carries messages."
    apart = edges[:, ~torch.isin(edges, torch.tensor(pair)).all(dim=0)]
    for own, count in (((4, 9), 1), ((9, 4), 1), ((4, 4), 0)):
        joined = torch.cat([apart, torch.tensor(own)[:, None]], dim=1)
        notes = attnkit.explain(model, (x, joined), method="random", index=pair).notes
        assert notes.count(said) == count


def test_the_gradient_finds_what_occlusion_finds():
    torch.manual_seed(0)
    (x, edges), model, pair = a_graph(41, 190), Pairs().eval(), (4, 9)
    seen = attnkit.explain(model, (x, edges), method="removal_gradient", index=pair)
    assert (seen.edges[~seen.candidates] == 0).all()
    fidelity = seen.fidelity(ks=[1, 2, 4])
    assert fidelity.verdict == "better than random"
    lines = str(seen).splitlines()
    assert lines[0].startswith("removal_gradient of the pair 4, 9: 0, p = ")
    assert len(seen.draw(fidelity=fidelity).axes) == 3


def test_a_model_that_reads_out_edges_is_asked_as_it_is():
    x, edges = a_graph(17, 60)
    model = attnkit.GraphTransformer(CHANNELS, 12, 1, num_layers=2, heads=3, readout="edge").eval()
    given = {"x": x, "edge_index": edges}
    seen = attnkit.explain(model, given, method="occlusion", index=[3, 5])
    torch.testing.assert_close(seen.edges, lost(model, x, edges, (3, 5)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ((1, 2, 3), ValueError, r"index: expected a node, or a pair .* got \(1, 2, 3\)"),
        ((1, 13), ValueError, r"index: expected nodes from 0 to 12, got \(1, 13\)"),
        ((1, -1), ValueError, "index: expected 0 or more, got -1"),
        ((1, "a"), TypeError, "index: expected an integer, got"),
        ((1, None), ValueError, r"index: expected a node, or a pair .* got \(1, None\)"),
    ],
)
def test_a_wrong_pair_is_named(index, error, message):
    with pytest.raises(error, match=message):
        attnkit.explain(Pairs().eval(), a_graph(13, 40), index=index)


def test_a_model_without_pairs_is_named():
    with pytest.raises(TypeError, match=r"index: expected a node, since GATv2Conv takes no pairs"):
        attnkit.explain(pyg.GATv2Conv(CHANNELS, 3).eval(), a_graph(13, 40), index=(1, 2))
