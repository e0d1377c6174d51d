"""Rollout and relevance as rows: closed forms, and the products of matrices that they stand for."""

import pytest
import torch
from torch.nn import functional as F

from attnkit import attend
from attnkit.core.capture.watch import watch_attention
from attnkit.interpret.methods.flow import Step, relevance, rollout

BATCH, HEADS, TOKENS, LAYERS, DIM = 2, 3, 11, 4, 5


def run_layers(tokens, weights, num_queries=None):
    """Layers of attention with a residual; the last has fewer queries if told. Each its module."""

    class Layer(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x, queries=None):
            q, k, v = (
                (x @ w).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for w in self.weight.unbind()
            )
            out = attend(q if queries is None else q[:, :, queries], k, v)
            return out.transpose(1, 2).flatten(2)

    layers = torch.nn.ModuleList(Layer(weight) for weight in weights)
    with watch_attention(layers) as calls:
        for layer in layers[:-1]:
            tokens = tokens + layer(tokens)
        rows = slice(0, num_queries)
        tokens = tokens[:, rows] + layers[-1](tokens, None if num_queries is None else rows)
    steps = [Step(call, torch.arange(call.num_queries), TOKENS) for call in calls]
    return tokens, steps


@pytest.fixture
def ran():
    def run(num_queries=None, scale=1.0):
        dim = HEADS * DIM
        tokens = torch.randn(BATCH, TOKENS, dim, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(LAYERS, 3, dim, dim, dtype=torch.float64) * scale
        return run_layers(tokens, weights, num_queries)

    return run


@pytest.mark.parametrize("row", [0, 7])
def test_uniform_attention_rolls_out_to_a_known_share(ran, row):
    _, steps = ran(scale=0.0)
    start = F.one_hot(torch.tensor([row] * BATCH), TOKENS).double()
    got = rollout(steps, start)
    even = (1 - 2**-LAYERS) / TOKENS
    expected = torch.full((BATCH, TOKENS), even, dtype=torch.float64)
    expected[:, row] += 2**-LAYERS
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("num_queries", [None, 1, 3])
def test_rollout_is_a_row_of_the_product(ran, num_queries):
    _, steps = ran(num_queries)
    start = torch.rand(BATCH, steps[-1].call.num_queries, dtype=torch.float64)
    matrix = torch.eye(TOKENS, dtype=torch.float64)
    for step in steps:
        weights = step.call.weights().mean(dim=1)
        identity = torch.eye(TOKENS, dtype=torch.float64)[: weights.shape[1]]
        matrix = (weights + identity) / 2 @ matrix
    torch.testing.assert_close(rollout(steps, start), (start[:, None] @ matrix)[:, 0])


@pytest.mark.parametrize("num_queries", [None, 1, 3])
def test_relevance_is_a_row_of_the_product(ran, num_queries):
    tokens, steps = ran(num_queries)
    y = (tokens * torch.randn_like(tokens)).sum()
    gradients = torch.autograd.grad(y, [step.call.output for step in steps])
    start = torch.rand(BATCH, steps[-1].call.num_queries, dtype=torch.float64)
    matrix = torch.eye(TOKENS, dtype=torch.float64)
    for step, gradient in zip(steps, gradients, strict=True):
        weights = step.call.weights() * (gradient @ step.call.value.detach().transpose(2, 3))
        identity = torch.eye(TOKENS, dtype=torch.float64)[: weights.shape[2]]
        matrix = (weights.relu().mean(dim=1) + identity) @ matrix
    rows = torch.eye(TOKENS, dtype=torch.float64)[: start.shape[1]]
    expected = (start[:, None] @ (matrix - rows))[:, 0]
    torch.testing.assert_close(relevance(steps, start, gradients), expected)


def test_learned_queries_carry_nothing_back(ran):
    tokens, steps = ran(3)
    learned = Step(steps[-1].call, None, TOKENS)
    start = torch.rand(BATCH, 3, dtype=torch.float64)
    weights = steps[-1].call.weights().mean(dim=1)
    torch.testing.assert_close(rollout([learned], start), (start[:, None] @ weights)[:, 0])
    (gradient,) = torch.autograd.grad(tokens.sum(), [steps[-1].call.output])
    got = relevance([learned], start, [gradient])
    torch.testing.assert_close(got, relevance([steps[-1]], start, [gradient]))


def test_a_pool_that_leaves_the_prefix_out_gives_it_nothing(ran):
    _, steps = ran()
    start = torch.rand(BATCH, TOKENS, dtype=torch.float64)
    wider = Step(steps[0].call, None, TOKENS + 2)
    got = rollout([wider], start)
    torch.testing.assert_close(got[:, :2], torch.zeros(BATCH, 2, dtype=torch.float64))
    torch.testing.assert_close(got[:, 2:], rollout([Step(steps[0].call, None, TOKENS)], start))


def test_a_layer_left_out_passes_on_what_it_is_given(ran):
    tokens, steps = ran()
    gradients = torch.autograd.grad(tokens.sum(), [step.call.output for step in steps])
    start = torch.rand(BATCH, TOKENS, dtype=torch.float64)
    steps[1].is_used = steps[2].is_used = False
    ends = [steps[0], steps[3]]
    torch.testing.assert_close(rollout(steps, start), rollout(ends, start))
    got = relevance(steps, start, gradients)
    expected = relevance(ends, start, [gradients[0], gradients[3]])
    torch.testing.assert_close(got, expected)
    assert (got > 0).any()
