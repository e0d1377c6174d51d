"""Weights of edges: against the definition, what attention does with them, and its memory."""

import pytest
import torch
from support import Largest, with_third

import attnkit
from attnkit import (
    Additive,
    Cosine,
    EdgeFeatures,
    Edges,
    Gaussian,
    General,
    ScaledDot,
    edge_weights,
)
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.edges import scores as edge_scores
from attnkit.core.kernels.reference import softmax_of_edges

BATCH, HEADS, DIM, EDGE_DIM, TARGETS, SOURCES = 2, 3, 5, 2, 11, 13


def rand(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def random_edges(num_edges=41, is_sorted=False):
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(SOURCES, (num_edges,), generator=generator)
    target = torch.randint(TARGETS - 2, (num_edges,), generator=generator)
    return torch.stack([source, target.sort().values if is_sorted else target])


GRAPHS = {
    "some": random_edges(),
    "sorted": random_edges(is_sorted=True),
    "repeated": torch.cat([random_edges(), random_edges()[:, :7]], dim=1),
    "one edge": random_edges(1),
    "no edges": random_edges(0),
}
SCORES = {
    "scaled_dot": (lambda: "scaled_dot", []),
    "general": (General, [rand(HEADS, DIM, DIM, seed=4)]),
    "cosine": (Cosine, [(rand(HEADS).detach().abs() + 0.5).requires_grad_()]),
    "gaussian": (Gaussian, [(rand(HEADS).detach().abs() + 1).requires_grad_()]),
    "tanh": (Additive, [rand(HEADS, DIM, seed=5)]),
    "gatv2": (lambda vector: Additive(vector, "leaky_relu", 0.3), [rand(HEADS, DIM, seed=5)]),
    "softcap": (lambda: ScaledDot(softcap=1.0), []),
}


@pytest.fixture(params=["groups", "blocks"])
def computed_in(request, monkeypatch):
    """All heads of a small graph at once, or each alone and in blocks of a few edges."""
    if request.param == "blocks":
        monkeypatch.setattr(edge_scores, "GROUP", 0)
        monkeypatch.setattr(edge_scores, "BLOCK", 40)


def results(output, inputs):
    towards = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    gradients = torch.autograd.grad(output, inputs, towards.to(output.dtype), allow_unused=True)
    return [output, *gradients]


@pytest.mark.parametrize(
    ("graph", "score", "with_features"), with_third(GRAPHS, SCORES, [False, True])
)
def test_the_weights_are_those_of_the_definition(graph, score, with_features, computed_in):
    make_score, parameters = SCORES[score]
    mask = Edges(GRAPHS[graph], TARGETS, SOURCES)
    query = rand(BATCH, HEADS, TARGETS, DIM, seed=1)
    key = rand(BATCH, HEADS, SOURCES, DIM, seed=2)
    inputs, features = [query, key, *parameters], None
    if with_features:
        carried = [rand(mask.num_edges, EDGE_DIM, seed=6), rand(HEADS, DIM, EDGE_DIM, seed=7)]
        features = EdgeFeatures(*carried, value_weight=rand(HEADS, 7, EDGE_DIM))
        inputs += carried
    options = {"score": make_score(*parameters)}
    keys_only = None if features is None else EdgeFeatures(*carried)
    checked = check_inputs(query, key, key, mask=mask, edge_features=keys_only, **options)
    expected = results(softmax_of_edges(checked, mask), inputs)
    actual = results(edge_weights(query, key, mask, edge_features=features, **options), inputs)
    assert actual[0].shape == (BATCH, HEADS, mask.num_edges)
    for ours, theirs in zip(actual, expected, strict=True):
        ours, theirs = (torch.zeros(()) if t is None else t for t in (ours, theirs))
        torch.testing.assert_close(ours, theirs.expand_as(ours), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("score", ["scaled_dot", "tanh"])
def test_gradcheck(score, computed_in):
    make_score, parameters = SCORES[score]
    mask = Edges(GRAPHS["repeated"], TARGETS, SOURCES)
    query, key = rand(HEADS, TARGETS, DIM, seed=1), rand(HEADS, SOURCES, DIM, seed=2)

    def function(query, key, *parameters):
        return edge_weights(query, key, mask, score=make_score(*parameters))

    assert torch.autograd.gradcheck(function, (query, key, *parameters), fast_mode=True)


def test_attention_averages_with_them():
    mask = Edges(GRAPHS["repeated"], TARGETS, SOURCES)
    query, key = rand(HEADS, TARGETS, DIM, seed=1), rand(1, SOURCES, DIM, seed=2)
    value = rand(1, SOURCES, 7, seed=3)
    weights = edge_weights(query, key, mask, scale=0.3)
    assert weights.shape == (HEADS, mask.num_edges)
    source, target = mask.edge_index
    expected = torch.zeros(HEADS, TARGETS, 7, dtype=torch.float64)
    expected = expected.index_add(1, target, weights[..., None] * value[:, source])
    torch.testing.assert_close(attnkit.attend(query, key, value, mask=mask, scale=0.3), expected)


def test_precision_and_scores_that_differ_by_much():
    mask = Edges(GRAPHS["some"], TARGETS, SOURCES)
    spread = torch.logspace(-3, 3, TARGETS)[:, None]
    query = rand(HEADS, TARGETS, DIM, seed=1, dtype=torch.float32).detach() * spread
    key = rand(HEADS, SOURCES, DIM, seed=2, dtype=torch.float32).detach()
    weights = edge_weights(query, key, mask)
    exact = edge_weights(query.double(), key.double(), mask)
    torch.testing.assert_close(weights.double(), exact, atol=1e-4, rtol=1e-3)
    sums = torch.zeros(HEADS, TARGETS).index_add(1, mask.edge_index[1], weights)
    alive = torch.isin(torch.arange(TARGETS), mask.edge_index[1])
    torch.testing.assert_close(sums, alive.float().expand(HEADS, -1))
    with torch.autocast("cpu", torch.bfloat16):
        assert edge_weights(query, key, mask).dtype == torch.bfloat16


@pytest.mark.parametrize("score", ["scaled_dot", "general", "cosine", "gaussian", "tanh", "gatv2"])
def test_nothing_of_edges_times_channels_is_made(score, monkeypatch):
    monkeypatch.setattr(edge_scores, "GROUP", 2**13)
    monkeypatch.setattr(edge_scores, "BLOCK", 2**13)
    make_score, parameters = SCORES[score]
    num_edges = 10_007
    mask = Edges(random_edges(num_edges), TARGETS, SOURCES)
    query, key = rand(HEADS, TARGETS, DIM, seed=1), rand(HEADS, SOURCES, DIM, seed=2)
    with Largest() as largest:
        edge_weights(query, key, mask, score=make_score(*parameters)).square().sum().backward()
    assert largest.numel <= HEADS * num_edges


def test_what_it_refuses():
    query = rand(HEADS, TARGETS, DIM)
    with pytest.raises(TypeError, match=r"edges: expected attnkit\.Edges, got Tensor"):
        edge_weights(query, query, GRAPHS["some"])
    with pytest.raises(ValueError, match="mask: Edges has 11 targets and 13 sources"):
        edge_weights(query, query, Edges(GRAPHS["some"], TARGETS, SOURCES))
