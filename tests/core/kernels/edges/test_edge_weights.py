"""Weights of edges: against the definition, and what attention does with them."""

import pytest
import torch
from edge_graphs import (
    HEADS,
    SCORES,
    SOURCES,
    TARGETS,
    given,
    graphs,
    rand,
    random_graph,
    results,
)
from support import with_third

import attnkit
from attnkit import EdgeFeatures, Edges, edge_weights
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.reference import softmax_of_edges

EDGE_DIM = 2


@pytest.mark.parametrize(
    ("graph", "score", "with_features"), with_third(graphs(), SCORES, [False, True])
)
def test_the_weights_are_those_of_the_definition(graph, score, with_features, computed_in):
    (query, key, _, *parameters), make_score = given(score)
    mask = graphs()[graph]
    inputs, options, keys_only = [query, key, *parameters], {}, None
    if with_features and score not in ("cosine", "gaussian"):
        carried = [rand(mask.num_edges, EDGE_DIM, seed=6), rand(HEADS, key.shape[3], EDGE_DIM)]
        bias = rand(HEADS, mask.num_edges, seed=9)
        value_weight = rand(HEADS, 7, EDGE_DIM)  # which changes no weight
        options["edge_features"] = EdgeFeatures(*carried, value_weight, bias)
        keys_only = EdgeFeatures(*carried, bias=bias)
        inputs += [*carried, bias]
    scores = [make_score([None, None, None, *parameters]) for _ in range(2)]
    checked = check_inputs(query, key, key, mask=mask, edge_features=keys_only, score=scores[0])
    expected = results(softmax_of_edges(checked, mask), inputs)
    actual = results(edge_weights(query, key, mask, score=scores[1], **options), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


def test_attention_averages_with_them():
    mask = graphs()["repeated"]
    query, key = rand(HEADS, TARGETS, 5, seed=1), rand(1, SOURCES, 5, seed=2)
    value = rand(1, SOURCES, 7, seed=3)
    weights = edge_weights(query, key, mask, scale=0.3)
    source, target = mask.edge_index
    expected = torch.zeros(HEADS, TARGETS, 7, dtype=torch.float64)
    expected = expected.index_add(1, target, weights[..., None] * value[:, source])
    torch.testing.assert_close(attnkit.attend(query, key, value, mask=mask, scale=0.3), expected)


def test_precision_and_scores_that_differ_by_much():
    mask, spread = graphs()["some"], torch.logspace(-3, 3, TARGETS)[:, None]
    query = rand(HEADS, TARGETS, 5, seed=1, dtype=torch.float32).detach() * spread
    key = rand(HEADS, SOURCES, 5, seed=2, dtype=torch.float32).detach()
    weights = edge_weights(query, key, mask)
    exact = edge_weights(query.double(), key.double(), mask)
    torch.testing.assert_close(weights.double(), exact, atol=1e-4, rtol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert edge_weights(query, key, mask).dtype == torch.bfloat16


def test_what_it_refuses():
    query = rand(HEADS, TARGETS, 5)
    with pytest.raises(TypeError, match=r"edges: expected attnkit\.Edges, got Tensor"):
        edge_weights(query, query, random_graph())
    with pytest.raises(ValueError, match="mask: Edges has 11 targets and 13 sources"):
        edge_weights(query, query, Edges(random_graph(), TARGETS, SOURCES))
