"""Receptive fields: the outputs and gradients of the whole graph, at the nodes that are wanted."""

import pytest
import torch

import attnkit
from attnkit.layers import ReceptiveField

NODES, CHANNELS = 60, 11
EDGES = torch.randint(0, NODES, (2, 150), generator=torch.Generator().manual_seed(0))
WANTED = torch.tensor([7, 59, 3, 20])


def models():
    sep = {"mlp_ratio": 1.0, "separate_self": True, "norm": "layer", "num_layers": 3}
    common = {"dropout_p": 0.0, "attention_dropout_p": 0.0}
    local = {**common, "global_attention": None, "num_layers": 2}
    yield "gat", attnkit.GAT(CHANNELS, 16, 5, heads=2, **common)
    yield "gatv2", attnkit.GAT(CHANNELS, 16, 5, heads=2, score="gatv2", residual=True, **common)
    yield "one", attnkit.GAT(CHANNELS, 16, 5, num_layers=1, **common)
    yield "sep", attnkit.GAT(CHANNELS, 16, 5, heads=2, **sep, **common)
    yield "features", attnkit.GAT(CHANNELS, 16, 5, heads=2, edge_dim=3, **common)
    yield "transformer", attnkit.GraphTransformer(CHANNELS, 16, 5, heads=2, **local)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("name", "model"), list(models()))
def test_outputs_and_gradients_are_those_of_the_whole_graph(name, model, is_sparse):
    if is_sparse and name in ("sep", "transformer"):
        pytest.skip("its first layer is torch's, of dense features")
    x = torch.randn(NODES, CHANNELS) * (torch.rand(NODES, CHANNELS) < 0.4)
    given = [x.to_sparse_csr() if is_sparse else x]
    attributes = [torch.randn(150, 3)] if name == "features" else []
    model = model.double()
    given, attributes = [t.double() for t in given], [t.double() for t in attributes]
    field = ReceptiveField.of(EDGES, NODES, WANTED, model.num_hops)
    assert len(field.nodes) < NODES or model.num_hops == 3
    whole = model(*given, EDGES, *attributes)[WANTED]
    part = model(field.rows(given[0]), field, *attributes)
    torch.testing.assert_close(part, whole)
    for ours, theirs in zip(
        torch.autograd.grad(part.square().sum(), list(model.parameters())),
        torch.autograd.grad(whole.square().sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_it_holds_what_is_read_and_nothing_else():
    # 0 <- 1 <- 2 <- 3, and 4 apart
    path = torch.tensor([[1, 2, 3], [0, 1, 2]])
    field = ReceptiveField.of(path, 5, torch.tensor([0]), 2)
    assert field.nodes.tolist() == [0, 1, 2]
    assert [edges.sizes for edges in field.edges] == [(2, 3), (1, 2)]
    assert [kept.tolist() for kept in field.kept] == [[0, 1], [0]]
    assert field.num_edges == 3


def test_models_that_look_everywhere_say_so():
    assert attnkit.GAT(4, 8, 2, norm="batch").num_hops is None
    assert attnkit.GraphTransformer(4, 8, 2).num_hops is None


def test_wrong_fields_are_named():
    with pytest.raises(ValueError, match="wanted: expected each node once"):
        ReceptiveField.of(EDGES, NODES, torch.tensor([1, 1]), 2)
    field = ReceptiveField.of(EDGES, NODES, WANTED, 1)
    model = attnkit.GAT(CHANNELS, 16, 5)
    with pytest.raises(ValueError, match="nodes and 1 layers"):
        model(torch.randn(len(field.nodes), CHANNELS), field)
    with pytest.raises(ValueError, match="of 60 nodes, as x has"):
        model(torch.randn(NODES, CHANNELS), field)
