"""`diagnose_attention` on graphs: static scores, degrees, and 1/degree in attention's place."""

import math

import pytest
import torch
from scipy.stats import kendalltau
from torch import nn
from torch_geometric import nn as pyg

import attnkit
from attnkit import diagnose_attention
from attnkit.core.capture.calls import EdgeCall
from attnkit.interpret.head_measures import Sampling, measure_edges
from attnkit.tasks.graphs import DictionaryLookupData

NODES, EDGES, CHANNELS, HEADS, DIM = 13, 61, 5, 3, 7


def make_graph():
    torch.manual_seed(1)
    edges = torch.randint(NODES, (2, EDGES)).unique(dim=1)
    edges = edges[:, torch.randperm(edges.shape[1])]
    return torch.randn(NODES, CHANNELS), edges


def randomized(model):
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


def lookup(k=7):
    data = DictionaryLookupData(k, num_graphs=20)
    data.setup()
    graph = data.sets["test"][0]
    return graph.x, graph.edge_index


@pytest.mark.parametrize("whose", ["ours", "PyG's"])
def test_gat_is_static_and_gatv2_is_not(whose):
    x, edges = lookup()
    size = x.shape[1], DIM, HEADS
    if whose == "ours":
        gat, gatv2 = (attnkit.GraphAttention(*size, score=score) for score in ("gat", "gatv2"))
    else:
        gat, gatv2 = (
            convolution(*size, add_self_loops=False) for convolution in (pyg.GATConv, pyg.GATv2Conv)
        )
    found = diagnose_attention(randomized(gat), (x, edges))
    assert [row["static"] for row in found.rows] == [1.0] * HEADS
    assert "static: 3 of 3 heads rank the keys alike for every query" in found.findings[0]
    found = diagnose_attention(randomized(gatv2), (x, edges))
    assert max(row["static"] for row in found.rows) < 0.95


def call_of(edges, weights, num_nodes=NODES):
    no_loop = torch.zeros(edges.shape[1], dtype=torch.bool)
    return EdgeCall("layer", "pyg", edges, no_loop, (num_nodes, num_nodes), weights, weights)


def random_weights(edges):
    scores = torch.randn(edges.shape[1], HEADS).exp()
    sums = torch.zeros(NODES, HEADS).index_add(0, edges[1], scores)
    return scores / sums[edges[1]]


def test_measures_are_those_node_by_node():
    _, edges = make_graph()
    weights = random_weights(edges)
    found, by_degree = measure_edges(call_of(edges, weights), Sampling())
    entropies, moved, degrees, apart = [], [], [], []
    for node in range(NODES):
        own = weights[edges[1] == node].double()
        degree = len(own)
        if degree > 1:
            degrees.append(degree)
            entropies.append(torch.special.entr(own).sum(0) / math.log(degree))
            moved.append((own - 1 / degree).abs().sum(0) / 2)
            mixed = torch.special.entr((own[:, :, None] + own[:, None]) / 2).sum(0)
            each = torch.special.entr(own).sum(0)
            js = (mixed - (each[:, None] + each) / 2) / math.log(2)
            apart.append(js.sum(1) / (HEADS - 1))
    received = torch.zeros(NODES, HEADS).index_add(0, edges[0], weights)
    expected = {
        "entropy": torch.stack(entropies).mean(0),
        "uniform": torch.stack(moved).mean(0),
        "divergence": torch.stack(apart).mean(0),
        "sink": received.amax(0) / len(edges[1].unique()),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.float(), atol=1e-5, rtol=1e-5)
    for name, (low, high) in {"2": (2, 2), "3–4": (3, 4), "5–8": (5, 8)}.items():
        chosen = [e for e, degree in zip(entropies, degrees, strict=True) if low <= degree <= high]
        if chosen:
            expected = torch.stack(chosen).mean(0).float()
            torch.testing.assert_close(by_degree[name], expected, atol=1e-5, rtol=1e-5)
    assert len(by_degree) >= 2


def test_the_static_score_is_the_mean_tau_over_shared_sources():
    _, edges = make_graph()
    weights = random_weights(edges)
    taus = []
    for one in range(NODES):
        for other in range(one):
            first, second = (
                {int(edges[0, e]): weights[e] for e in (edges[1] == node).nonzero()[:, 0]}
                for node in (one, other)
            )
            shared = sorted(set(first) & set(second))
            if len(shared) > 1:
                taus.append(
                    [
                        kendalltau(
                            [float(first[s][head]) for s in shared],
                            [float(second[s][head]) for s in shared],
                        ).statistic
                        for head in range(HEADS)
                    ]
                )
    expected = torch.tensor(taus).mean(0).float()
    found, _ = measure_edges(call_of(edges, weights), Sampling(pairs=1000))
    assert len(taus) > 20
    torch.testing.assert_close(found["static"], expected, atol=1e-5, rtol=1e-5)


def test_nodes_of_one_edge_have_no_entropy():
    edges = torch.tensor([[0, 0, 1], [1, 2, 3]])
    found, by_degree = measure_edges(call_of(edges, torch.ones(3, 2), 4), Sampling())
    assert set(found) == {"sink"}
    torch.testing.assert_close(found["sink"], torch.full((2,), 2 / 3))
    assert not by_degree
    none = torch.zeros(2, 0, dtype=torch.long)
    assert measure_edges(call_of(none, torch.ones(0, 2), 4), Sampling()) == ({}, {})


@pytest.mark.parametrize("score", ["gat", "gatv2", "scaled_dot", "cosine", "PyG's"])
def test_accuracy_with_uniform_weights(score):
    x, edges = make_graph()
    if score == "PyG's":
        model = pyg.GATv2Conv(CHANNELS, DIM, 1, add_self_loops=False, bias=False)
        value = model.lin_l
    else:
        model = attnkit.GraphAttention(CHANNELS, DIM, 1, score=score, out_bias=False)
        value = model.projections
    randomized(model)
    values = value(x) if score == "PyG's" else value(x, x).value[0]
    degree = torch.zeros(NODES).index_add(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
    mean = torch.zeros_like(values).index_add(0, edges[1], values[edges[0]]) / degree[:, None]
    attended, uniform = model(x, edges).argmax(dim=1), mean.argmax(dim=1)
    assert (attended != uniform).any()
    found = diagnose_attention(model, (x, edges), labels=attended)
    assert found.accuracy == 1
    assert found.uniform_accuracy == pytest.approx(float((attended == uniform).float().mean()))
    labels = torch.where(torch.arange(NODES) < 5, uniform, -1)
    found = diagnose_attention(model, (x, edges), labels=labels)
    assert found.uniform_accuracy == 1
    expected = float((attended == uniform)[:5].float().mean())
    assert found.accuracy == pytest.approx(expected)
    assert f"accuracy: {expected:.4f} with attention, 1.0000 with 1/degree" in str(found)
    assert torch.equal(model(x, edges).argmax(dim=1), attended)


def test_edge_features_and_loops_are_made_uniform_too():
    x, edges = make_graph()
    features = torch.randn(edges.shape[1], 2)
    options = {"edge_dim": 2, "add_self_loops": True}
    for score in ("gat", "gatv2", "scaled_dot"):
        model = attnkit.GraphAttention(CHANNELS, DIM, HEADS, score=score, **options)
        labels = torch.zeros(NODES, dtype=torch.long)
        found = diagnose_attention(randomized(model), (x, edges, features), labels=labels)
        assert 0 <= found.uniform_accuracy <= 1
        assert min(row["uniform"] for row in found.rows) > 0.05


def test_attention_that_cannot_be_made_uniform_is_named():
    class Own(nn.Module):
        def forward(self, x, edges):
            x = x[None]
            return attnkit.attend(x, x, x, mask=attnkit.Edges(edges, NODES))[0]

    x, edges = make_graph()
    labels = torch.zeros(NODES, dtype=torch.long)
    with pytest.raises(ValueError, match=r"labels: the attention of \(itself\) cannot be made uni"):
        diagnose_attention(Own(), (x, edges), labels=labels)
    model = pyg.GATConv(CHANNELS, DIM)
    with pytest.raises(ValueError, match="labels: all are negative"):
        diagnose_attention(model, (x, edges), labels=labels - 1)


def test_types_of_edges_have_rows_of_their_own():
    x, edges = make_graph()
    kinds = {("a", "sees", "a"): edges, ("a", "hears", "a"): edges[:, :23]}
    model = randomized(pyg.HGTConv(CHANNELS, 6, (["a"], list(kinds)), 3))
    found = diagnose_attention(model, ({"a": x}, kinds))
    assert [row["edge_type"] for row in found.rows] == [kind for kind in kinds for _ in range(3)]
    assert "(itself), a hears a" in str(found)
    assert all(0 <= row["entropy"] <= 1 for row in found.rows)
