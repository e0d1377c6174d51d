"""Attention of torch_geometric's convolutions against what they return and what they compute."""

import pytest
import torch
from torch import nn
from torch.nn.functional import leaky_relu
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import gat_conv
from torch_geometric.utils import softmax

from attnkit.core.capture.pyg import (
    attention_convolutions,
    callers_places,
    watch_convolutions,
)

NODES, EDGES, CHANNELS, HEADS, DIM = 13, 41, 5, 3, 7
ALPHA = {"return_attention_weights": True}


def make_graph(num_loops=3):
    """A graph with loops, and edges given twice, in no order."""
    torch.manual_seed(1)
    edges = torch.randint(NODES, (2, EDGES))
    edges[1, edges[0] == edges[1]] += 1
    edges %= NODES
    edges[:, 5] = edges[:, 11]
    edges[:, [2, 17, 30][:num_loops]] = torch.tensor([4, 0, 9][:num_loops])
    return torch.randn(NODES, CHANNELS), edges


def randomized(module):
    torch.manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def watched(module, *args, **kwargs):
    """What it gives without and with the watch, and the calls."""
    plain = module(*args, **kwargs)
    calls = []
    with watch_convolutions(attention_convolutions(module), calls.append):
        output = module(*args, **kwargs)
    return plain, output, calls


RETURNING = {
    "GATConv": (lambda: pyg.GATConv(CHANNELS, DIM, HEADS), True),
    "GATConv alone": (lambda: pyg.GATConv(CHANNELS, DIM, HEADS, add_self_loops=False), False),
    "GATv2Conv": (lambda: pyg.GATv2Conv(CHANNELS, DIM, HEADS), True),
    "TransformerConv": (lambda: pyg.TransformerConv(CHANNELS, DIM, HEADS), False),
    "RGATConv": (lambda: pyg.RGATConv(CHANNELS, DIM, 2, heads=HEADS), False),
}


@pytest.mark.parametrize("name", RETURNING)
def test_weights_are_those_that_the_convolution_returns(name):
    x, edges = make_graph()
    make, has_loops = RETURNING[name]
    conv = randomized(make())
    types = {"edge_type": torch.arange(EDGES) % 2} if name == "RGATConv" else {}
    plain, output, (call,) = watched(conv, x, edges, **types)
    assert torch.equal(plain, output)
    _, (used, alpha) = conv(x, edges, **types, **ALPHA)
    num_loops = NODES if has_loops else 0
    assert call.layer == ""
    assert call.num_nodes == (NODES, NODES)
    assert torch.equal(call.edge_index[:, :EDGES], edges)
    assert call.weights.shape == (EDGES + num_loops, HEADS)
    assert call.is_added_loop.tolist() == [False] * EDGES + [True] * num_loops
    counted = torch.ones(EDGES + num_loops, dtype=torch.bool)
    counted[:EDGES] = (edges[0] != edges[1]) | (not has_loops)
    assert torch.equal(call.edge_index[:, counted], used)
    torch.testing.assert_close(call.weights[counted], alpha, atol=1e-5, rtol=0)
    assert not call.weights[~counted].any()


def test_convolutions_of_types_are_named_by_their_type():
    x, edges = make_graph()
    kinds = [("a", "sees", "b"), ("b", "sees", "b")]
    model = pyg.HeteroConv({k: pyg.GATConv(5, 2, add_self_loops=False) for k in kinds})
    _, _, calls = watched(model, {"a": x, "b": x[:11]}, {kinds[0]: edges % 11, kinds[1]: edges % 7})
    assert [call.layer for call in calls] == ["convs.<a___sees___b>", "convs.<b___sees___b>"]
    assert [call.num_nodes for call in calls] == [(13, 11), (11, 11)]


def agnn(conv, x, edges):
    x = nn.functional.normalize(x, dim=1)
    return conv.beta * (x[edges[0]] * x[edges[1]]).sum(dim=1, keepdim=True)


def supergat(conv, x, edges):
    x = conv.lin(x).view(-1, HEADS, DIM)
    source, target = x[edges[0]], x[edges[1]]
    alpha = (source * conv.att_l).sum(-1) + (target * conv.att_r).sum(-1)
    return leaky_relu(alpha * (source * target).sum(-1).sigmoid(), 0.2)


def general(conv, x, edges):
    message = conv.lin_msg(x[edges[0]]).view(-1, HEADS, DIM)
    return leaky_relu((message * conv.att_msg).sum(-1), 0.2)


def heat(conv, x, edges):
    x = conv.hetero_lin(x, HEAT["node_type"])
    carried = conv.edge_type_emb(HEAT["edge_type"]), conv.edge_attr_emb(HEAT["edge_attr"])
    parts = [x[edges[1]], x[edges[0]], *(leaky_relu(part, 0.2) for part in carried)]
    return leaky_relu(conv.att(torch.cat(parts, dim=1)), 0.2)


HEAT = {
    "node_type": torch.arange(NODES) % 3,
    "edge_type": torch.arange(EDGES) % 2,
    "edge_attr": torch.arange(EDGES * 2).view(-1, 2).float().sin(),
}
# the convolution, its scores before the softmax, what its edges are given, and are loops added?
EXPLICIT = {
    "AGNN": (pyg.AGNNConv, agnn, {}, True),
    "SuperGAT": (lambda: pyg.SuperGATConv(CHANNELS, DIM, HEADS), supergat, {}, True),
    "General": (
        lambda: pyg.GeneralConv(CHANNELS, DIM, attention=True, heads=HEADS), general, {}, False
    ),
    "HEAT": (lambda: pyg.HEATConv(CHANNELS, DIM, 3, 2, 5, 2, 7, heads=HEADS), heat, HEAT, False),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLICIT)
def test_weights_that_a_convolution_does_not_return_are_its_formula(name):
    make, scores_of, extra, has_loops = EXPLICIT[name]
    x, edges = make_graph()
    conv = randomized(make())
    plain, output, (call,) = watched(conv, x, edges, **extra)
    assert torch.equal(plain, output)
    loops = torch.arange(NODES if has_loops else 0).expand(2, -1)
    assert torch.equal(call.edge_index, torch.cat([edges, loops], dim=1))
    assert torch.equal(call.is_added_loop, torch.arange(call.edge_index.shape[1]) >= EDGES)
    used = torch.ones(call.edge_index.shape[1], dtype=torch.bool)
    used[:EDGES] = (edges[0] != edges[1]) | (not has_loops)
    edges = call.edge_index[:, used]
    expected = softmax(scores_of(conv, x, edges), edges[1], num_nodes=NODES)
    torch.testing.assert_close(call.weights[used], expected, atol=1e-5, rtol=0)
    assert not call.weights[~used].any()


def han(conv, nodes, kind, source, target):
    parts = (conv.proj[node](nodes[node]).view(-1, 3, 2) for node in (kind[0], kind[2]))
    vectors = (lin["__".join(kind)] for lin in (conv.lin_src, conv.lin_dst))
    of_source, of_target = (
        (part * vector).sum(-1) for part, vector in zip(parts, vectors, strict=True)
    )
    return leaky_relu(of_source[source] + of_target[target], 0.2)


def hgt(conv, nodes, kind, source, target):
    qkv = {node: part.view(-1, 3, 3, 2) for node, part in conv.kqv_lin(nodes).items()}
    number = 0 if kind[1] == "writes" else 1
    relation = conv.k_rel.weight.view(3, 2, 2, 2)[:, number]  # [heads, in, out]
    key = torch.einsum("nhd,hde->nhe", qkv[kind[0]][:, 0], relation)
    score = (qkv[kind[2]][target, 1] * key[source]).sum(-1)
    return score * conv.p_rel["__".join(kind)] / 2**0.5


@pytest.mark.parametrize(("kind", "scores_of"), [(pyg.HGTConv, hgt), (pyg.HANConv, han)])
def test_types_of_a_heterogeneous_graph_are_calls_of_their_own(kind, scores_of):
    torch.manual_seed(3)
    nodes = {"paper": torch.randn(11, CHANNELS), "author": torch.randn(7, CHANNELS)}
    writes = torch.stack([torch.randint(7, (23,)), torch.randint(11, (23,))])
    cites = torch.randint(11, (2, 17))
    edges = {("author", "writes", "paper"): writes, ("paper", "cites", "paper"): cites}
    conv = randomized(kind(CHANNELS, 6, (list(nodes), list(edges)), 3))
    plain, output, calls = watched(conv, nodes, edges)
    assert torch.equal(plain["paper"], output["paper"])
    assert [call.edge_type for call in calls] == list(edges)
    assert [call.num_nodes for call in calls] == [(7, 11), (11, 11)]
    for call in calls:
        assert torch.equal(call.edge_index, edges[call.edge_type])
    scores = [scores_of(conv, nodes, call.edge_type, *call.edge_index) for call in calls]
    targets, weights = [call.edge_index[1] for call in calls], [call.weights for call in calls]
    if kind is pyg.HGTConv:  # one softmax over the edges of all types into a node
        scores, targets, weights = ([torch.cat(each)] for each in (scores, targets, weights))
    for score, target, weight in zip(scores, targets, weights, strict=True):
        torch.testing.assert_close(weight, softmax(score, target), atol=1e-5, rtol=0)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pyg.GATConv(CHANNELS, DIM, HEADS)
        self.then = nn.ModuleList([pyg.GATv2Conv(HEADS * DIM, 2, HEADS, concat=False)])

    def forward(self, x, edge_index):
        return self.then[0](self.first(x, edge_index).relu(), edge_index)


def test_gradients_reach_the_weights_in_the_callers_order():
    """dy/dalpha = output's gradient times the value, edge by edge, and 0 for a loop replaced."""
    x, edges = make_graph()
    model = randomized(Deep())
    calls = []
    with watch_convolutions(attention_convolutions(model), calls.append):
        logits = model(x, edges)
    assert [call.layer for call in calls] == ["first", "then.0"]
    (gradient,) = torch.autograd.grad(logits[4, 1], calls[1].seen_in)
    conv = model.then[0]
    value = conv.lin_l(model.first(x, edges).relu()).view(-1, HEADS, 2)
    source, target = calls[1].edge_index
    expected = value[source, :, 1] / HEADS * (target == 4)[:, None]
    expected = expected * (calls[1].weights.sum(1) > 0)[:, None]
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_flow_sparse_and_bipartite_edges():
    x, edges = make_graph()
    conv = randomized(pyg.GATv2Conv(CHANNELS, DIM, HEADS))
    _, _, (call,) = watched(conv, x, edges)
    back = randomized(pyg.GATv2Conv(CHANNELS, DIM, HEADS, flow="target_to_source"))
    _, _, (flipped,) = watched(back, x, edges.flip(0))
    assert torch.equal(flipped.edge_index, call.edge_index)
    torch.testing.assert_close(flipped.weights, call.weights)
    sums = torch.zeros(NODES, HEADS).index_add(0, flipped.edge_index[1], flipped.weights)
    torch.testing.assert_close(sums, (sums > 0).float(), atol=1e-5, rtol=0)
    pairs = edges.unique(dim=1)
    matrix = torch.sparse_coo_tensor(pairs.flip(0), torch.ones(pairs.shape[1]), (NODES, NODES))
    _, _, (sparse,) = watched(conv, x, matrix.coalesce())
    place = {tuple(pair): row for row, pair in enumerate(sparse.edge_index.T.tolist())}
    _, _, (dense,) = watched(conv, x, pairs)
    rows = [place[tuple(pair)] for pair in pairs.T.tolist() if pair[0] != pair[1]]
    used = pairs[0] != pairs[1]
    torch.testing.assert_close(sparse.weights[rows], dense.weights[: pairs.shape[1]][used])
    conv = randomized(pyg.GATv2Conv((CHANNELS, 2), DIM, HEADS, add_self_loops=False))
    _, _, (call,) = watched(conv, (torch.randn(17, CHANNELS), torch.randn(NODES, 2)), edges)
    assert call.num_nodes == (17, NODES)


def test_names_are_as_before_after_the_block_even_if_it_raises():
    conv = pyg.GATConv(CHANNELS, DIM)
    x, edges = make_graph()
    found, calls = attention_convolutions(conv), []
    with watch_convolutions(found, calls.append), watch_convolutions(found, calls.append):
        conv(x, edges)
        with pytest.raises(RuntimeError):
            conv(x[:, :2], edges)
    assert len(calls) == 2
    assert gat_conv.softmax is softmax
    assert not conv._forward_hooks
    assert not conv._propagate_forward_pre_hooks


def test_edges_that_are_not_the_callers_are_refused():
    given = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 1]])
    edges, places = callers_places(torch.tensor([[0, 2, 2, 0, 1], [1, 0, 1, 0, 1]]), given)
    assert edges.tolist() == [[0, 1, 2, 2, 0, 1], [1, 1, 0, 1, 0, 1]]
    assert places.tolist() == [0, 2, 3, 4, 5]
    edges, places = callers_places(
        torch.tensor([[1, 2, 0, 1, 2], [1, 1, 1, 0, 0]]), torch.tensor([[0, 2, 1, 2], [1, 0, 0, 1]])
    )
    assert edges.tolist() == [[0, 2, 1, 2, 1], [1, 0, 0, 1, 1]]
    assert places.tolist() == [4, 3, 0, 2, 1]
    with pytest.raises(ValueError, match="edge_index: the layer goes along 2 edges that are not"):
        callers_places(torch.tensor([[0, 1], [1, 2]]), given)


def test_a_softmax_of_some_edges_is_refused():
    x, edges = make_graph()
    conv = pyg.RGATConv(CHANNELS, DIM, 2, attention_mechanism="within-relation")
    with pytest.raises(ValueError, match=r"RGATConv takes the softmax of \d+ of its 41 edges"):
        watched(conv, x, edges, edge_type=torch.arange(EDGES) % 2)
