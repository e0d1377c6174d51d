"""Fidelity of edges against the model run by hand, and against PyG where it is right."""

import math

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.explain import Explainer, Explanation, metric
from torch_geometric.explain.algorithm import DummyExplainer

from attnkit import edge_fidelity, explain

NODES, EDGES, CHANNELS, CLASSES, INDEX = 11, 41, 5, 3, 4


class Sums(nn.Module):
    """Sums of messages, of which a mask of 0 and 1 leaves out edges as if they were not there."""

    def __init__(self):
        super().__init__()
        self.first = pyg.GraphConv(CHANNELS, 7)
        self.last = pyg.GraphConv(7, CLASSES)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).tanh(), edge_index)


@pytest.fixture
def graph():
    torch.manual_seed(1)
    edges = torch.randint(NODES, (2, EDGES))
    edges[1, edges[0] == edges[1]] += 1
    return torch.randn(NODES, CHANNELS), edges % NODES


def randomized(model):
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.7)
    return model.eval()


def pygs_explainer(model):
    return Explainer(
        model,
        DummyExplainer(),
        explanation_type="model",
        edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification",
            "task_level": "node",
            "return_type": "raw",
        },
    )


def pygs_explanation(graph, model, mask, index):
    x, edges = graph
    logits = model(x, edges)
    found = Explanation(x=x, edge_index=edges, edge_mask=mask, index=index)
    found.prediction, found.target = logits, logits.argmax(dim=1)
    found._model_args = []
    return found


def test_fidelity_is_that_of_the_thinned_graph(graph):
    x, edges = graph
    model = randomized(Sums())
    scores = torch.rand(EDGES)
    found = edge_fidelity(model, graph, scores, INDEX, ks=[1, 5, 7], num_draws=5)
    probability = model(x, edges).softmax(dim=1)[INDEX].detach()
    target = int(probability.argmax())
    assert found.target == target
    assert found.probability == pytest.approx(float(probability[target]))
    near = torch.zeros(NODES, dtype=torch.bool)
    near[INDEX] = True
    near[edges[0, edges[1] == INDEX]] = True
    order = (scores * near[edges[1]]).argsort(descending=True)
    for row in found.rows:
        best = order[: int(row["k"])]
        kept = torch.ones(EDGES, dtype=torch.bool)
        kept[best] = False
        left_out = model(x, edges[:, kept]).softmax(dim=1)[INDEX]
        alone = model(x, edges[:, best]).softmax(dim=1)[INDEX]
        for name, part in {"plus": left_out, "minus": alone}.items():
            assert row[name] == pytest.approx(float(probability[target] - part[target]), abs=1e-5)
            assert row[f"{name}_prediction"] == float(part.argmax() != target)
            low, mean, high = (row[f"random_{name}{end}"] for end in ("_low", "", "_high"))
            assert low < mean < high


def test_pygs_fidelity_of_a_hard_mask_and_a_sum_of_messages_is_ours(graph):
    model = randomized(Sums())
    explainer, seen = pygs_explainer(model), set()
    for index in range(NODES):
        candidates = explain(model, graph, index=index, method="random").candidates
        for k in (1, 4, 9):
            if int(candidates.sum()) <= k:
                continue
            scores = torch.rand(EDGES)
            (row,) = edge_fidelity(model, graph, scores, index, ks=[k], num_draws=2).rows
            mask = torch.zeros(EDGES)
            mask[(scores * candidates).argsort(descending=True)[:k]] = 1
            theirs = metric.fidelity(explainer, pygs_explanation(graph, model, mask, index))
            assert (row["plus_prediction"], row["minus_prediction"]) == theirs
            seen.add(theirs)
    assert len(seen) >= 3


class OneEdge(nn.Module):
    """Class 1 if one edge is there, else class 0; other edges do nothing."""

    def __init__(self, edge):
        super().__init__()
        self.edge = edge
        self.pass_on = pyg.SimpleConv()  # counted as a step

    def forward(self, x, edge_index):
        there = (edge_index == self.edge[:, None]).all(dim=0).any().float()
        return torch.stack([1 - there, there]).mul(3).expand(NODES, 2)


def test_the_edge_that_decides_is_better_than_random():
    edges = torch.stack([torch.arange(1, NODES), torch.zeros(NODES - 1).long()])
    graph = torch.randn(NODES, 1), edges
    model = OneEdge(edges[:, 6])
    best = torch.zeros(10)
    best[6] = 1
    found = edge_fidelity(model, graph, best, 0, ks=[1, 3], num_draws=7)
    p = math.exp(3) / (1 + math.exp(3))
    assert found.probability == pytest.approx(p)
    for row in found.rows:
        assert row["plus"] == pytest.approx(2 * p - 1)
        assert row["minus"] == pytest.approx(0)
        assert (row["plus_prediction"], row["minus_prediction"]) == (1, 0)
    assert found.verdict == "better than random"
    assert str(found).startswith(
        "Without the 3 edges that rank first, p(1) goes from 0.95 to 0.05; without 3 random edges,"
    )
    assert str(found).endswith("Over 1, 3 edges: better than random.")
    found = edge_fidelity(model, graph, -best, 0, num_draws=20)
    assert found.verdict == "no better than random"
    found = edge_fidelity(model, graph, best, 0, target=0, num_draws=20)
    assert found.rows[3]["plus"] == pytest.approx(1 - 2 * p)
    assert found.rows[3]["plus_prediction"] == 1
    assert found.verdict == "worse than random"
    seen = explain(model, graph, index=0, method="occlusion")
    assert seen.trust().verdict == "better than random"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": torch.ones(3)}, r"scores: expected \[edges\] = \[41\], got \[3\]"),
        ({"ks": []}, "ks: expected 1 to"),
        ({"ks": [0]}, "ks: expected 1 to"),
        ({"ks": [41]}, "ks: expected 1 to"),
        ({"num_draws": 1}, "num_draws: expected at least 2"),
        ({"index": 99}, "index: the model answers for 11 nodes, got 99|0 edges reach the node"),
    ],
)
def test_wrong_arguments_are_named(graph, options, message):
    given = {"scores": torch.ones(EDGES), "index": INDEX, **options}
    with pytest.raises(ValueError, match=message):
        edge_fidelity(randomized(Sums()), graph, **given)
