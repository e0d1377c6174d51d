"""Which edges can change an answer, against the model without each of them."""

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import attnkit

NODES, CHANNELS, CLASSES, INDEX = 13, 5, 3, 4


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
    whole = model(x, edges)[INDEX, 1]
    lost = [
        whole - model(x, edges[:, torch.arange(edges.shape[1]) != edge])[INDEX, 1]
        for edge in range(edges.shape[1])
    ]
    expected = torch.stack(lost).detach()
    torch.testing.assert_close(seen.edges, expected, atol=1e-4, rtol=1e-3)
    assert (expected.abs() > 1e-3).sum() >= 2
    assert not expected[~seen.candidates].abs().gt(1e-4).any()
    if name in ("reused", "SG", "two layers"):
        assert 1 < int(seen.candidates.sum()) < edges.shape[1]
