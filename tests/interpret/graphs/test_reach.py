"""Which edges can change the answer of a node or a pair, against the model without each of them."""

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import attnkit

NODES, CHANNELS, CLASSES, INDEX = 13, 5, 3, 4


def lost(answer, edges):
    """What an answer loses without each edge."""
    with torch.no_grad():
        whole, keep = answer(edges), ~torch.eye(edges.shape[1], dtype=torch.bool)
        return whole - torch.stack([answer(edges[:, one]) for one in keep])


def lost_of_pair(model, x, edges, pair):
    return lost(lambda some: model(x, some, pairs=torch.tensor(pair)[:, None])[0, 0], edges)


class Reused(nn.Module):
    """One layer that runs three times."""

    def __init__(self):
        super().__init__()
        self.layer = pyg.GATv2Conv(CHANNELS, CHANNELS)

    def forward(self, x, edge_index):
        for _ in range(3):
            x = self.layer(x, edge_index).tanh()
        return x


class Numbered(nn.Module):
    """A layer whose nodes have no features, but vectors of their own."""

    def __init__(self):
        super().__init__()
        self.own = nn.Embedding(NODES, CHANNELS)
        self.layer = pyg.SGConv(CHANNELS, CLASSES, K=3)

    def forward(self, number, edge_index):
        return self.layer(self.own(number), edge_index)


MODELS = {
    "reused": Reused,
    "gated": lambda: pyg.GatedGraphConv(CHANNELS, num_layers=3),
    "ARMA": lambda: pyg.ARMAConv(CHANNELS, CLASSES, num_layers=3),
    "SG": lambda: pyg.SGConv(CHANNELS, CLASSES, K=2),
    "degrees": lambda: pyg.GCNConv(CHANNELS, CLASSES),
    "two layers": lambda: attnkit.GAT(CHANNELS, 8, CLASSES, heads=2, num_layers=2),
    "numbered": Numbered,
    "polynormer": lambda: attnkit.Polynormer(
        CHANNELS, 12, CLASSES, heads=3, num_local_layers=2, local_steps=0
    ),
    "exphormer": lambda: attnkit.GraphTransformer(
        CHANNELS, 12, CLASSES, heads=3, global_attention=None, expander_degree=2
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_edge_that_matters_has_a_number(name):
    """On a path of edges into the node, with some beside it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    path = torch.stack([torch.arange(1, NODES), torch.arange(NODES - 1)])
    edges = torch.cat([path, torch.tensor([[9, 2, 12, 0], [4, 7, 5, 11]])], dim=1)
    x = torch.arange(NODES) if name == "numbered" else torch.randn(NODES, CHANNELS)
    seen = attnkit.explain(model, (x, edges), 1, "occlusion", index=INDEX)
    expected = lost(lambda some: model(x, some)[INDEX, 1], edges)
    torch.testing.assert_close(seen.edges, expected, atol=1e-4, rtol=1e-3)
    assert (expected.abs() > 1e-3).sum() >= 2
    assert not expected[~seen.candidates].abs().gt(1e-4).any()
    if name in ("reused", "SG", "two layers"):
        assert 1 < int(seen.candidates.sum()) < edges.shape[1]


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


@pytest.mark.parametrize("nodes", [13, 211])  # a part of the larger graph is asked
def test_occlusion_is_what_the_score_loses_without_an_edge(nodes):
    torch.manual_seed(0)
    (x, edges), model, pair = a_graph(nodes, 3 * nodes // 2), Pairs().eval(), (4, 9)
    seen = attnkit.explain(model, (x, edges), method="occlusion", index=pair)
    expected = lost_of_pair(model, x, edges, pair)
    torch.testing.assert_close(seen.edges, expected, atol=1e-5, rtol=1e-4)
    assert not expected[~seen.candidates].any()
    near = {*pair, *edges[0, torch.isin(edges[1], torch.tensor(pair))].tolist()}
    assert torch.equal(seen.candidates, torch.isin(edges[1], torch.tensor([*near])))
    assert (seen.unit.target.part is not None) == (nodes > 100)
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
    torch.testing.assert_close(
        seen.edges, lost_of_pair(model, x, edges, (3, 5)), atol=1e-5, rtol=1e-4
    )


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
