"""Scores that a block learns: equal to their formulas, trained, saved and loaded."""

import pytest
import torch
from torch.nn import functional as F

import attnkit
from attnkit import MultiHeadAttention, ScaledDot, learned_scores
from attnkit.core.scores.kinds import SCORES

BATCH, QUERIES, KEYS, DIM, HEADS, HEAD_DIM = 3, 5, 7, 22, 6, 11


def formula(name, score, query, key):
    left, right = query[:, :, :, None], key[:, :, None]
    if name == "general":
        return torch.einsum("bhqd,hde,bhke->bhqk", query, score.weight, key)
    if name == "additive":
        return torch.einsum("bhqkd,hd->bhqk", torch.tanh(left + right), score.vector)
    if name == "cosine":
        return F.cosine_similarity(left, right, dim=-1) / score.log_temperature.exp()[:, None, None]
    square = (left - right).square().sum(-1)
    return -square / (2 * score.log_bandwidth.exp()[:, None, None] ** 2)


def test_a_block_knows_the_names_of_all_scores():
    assert set(learned_scores.SCORE_NAMES) == {*SCORES, *learned_scores.LEARNED_SCORES}
    for name in learned_scores.SCORE_NAMES:
        assert MultiHeadAttention(DIM, HEADS, head_dim=HEAD_DIM, score=name).score is not None


@pytest.mark.parametrize("name", learned_scores.LEARNED_SCORES)
def test_block_equals_the_formula(name):
    block = MultiHeadAttention(DIM, HEADS, num_kv_heads=2, head_dim=HEAD_DIM, score=name).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64)
    y = torch.randn(BATCH, KEYS, DIM, dtype=torch.float64)
    sizes = block.sizes
    query = F.linear(x, block.in_proj.weight[: sizes[0]], block.in_proj.bias[: sizes[0]])
    key, value = F.linear(
        y, block.in_proj.weight[sizes[0] :], block.in_proj.bias[sizes[0] :]
    ).split(sizes[1:], dim=-1)
    query = query.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
    key, value = (
        t.unflatten(-1, (2, HEAD_DIM)).transpose(1, 2).repeat_interleave(3, dim=1)
        for t in (key, value)
    )
    weights = formula(name, block.score, query, key).softmax(dim=-1)
    expected = block.out_proj((weights @ value).transpose(1, 2).flatten(2))
    actual = block(x, y)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(block.attention_weights(x, y, heads=[4, 1]), weights[:, [4, 1]])
    wanted = list(block.parameters())
    for ours, right in zip(
        torch.autograd.grad(actual.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("name", ["general", "gaussian"])
def test_some_begin_close_to_the_scaled_dot_product(name):
    score = learned_scores.LEARNED_SCORES[name](HEADS, HEAD_DIM)()
    query, key = torch.randn(BATCH, HEADS, QUERIES, HEAD_DIM), torch.randn(1, HEADS, 1, HEAD_DIM)
    key = key + F.normalize(torch.randn(BATCH, HEADS, KEYS, HEAD_DIM), dim=-1)
    if name == "gaussian":
        key = F.normalize(key, dim=-1)  # of one length: the dot product alone decides
    torch.testing.assert_close(
        attnkit.attention_weights(query, key, score=score), attnkit.attention_weights(query, key)
    )


def test_plain_scores_and_modules_of_ones_own():
    x = torch.randn(BATCH, QUERIES, DIM)
    plain = MultiHeadAttention(DIM, 2)
    assert list(plain.state_dict()) == [
        f"{name}.{kind}" for name in ("in_proj", "out_proj") for kind in ("weight", "bias")
    ]
    capped = MultiHeadAttention(DIM, 2, score=ScaledDot(softcap=0.1))
    capped.load_state_dict(plain.state_dict())
    assert (capped(x) - plain(x)).abs().max() > 1e-4
    capped.score = ScaledDot(softcap=1e4)
    torch.testing.assert_close(capped(x), plain(x))
    own = learned_scores.AdditiveScore(2, 11, activation="leaky_relu", softcap=5.0)
    block = MultiHeadAttention(DIM, 2, score=own)
    with attnkit.record_backends() as record:
        block(x)
    assert record.total() == {"blockwise": 1}
    assert block.state_dict()["score.vector"].shape == (2, 11)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda: "bilinear",
            "expected one of scaled_dot, dot, cosine, gaussian, general, additive",
        ),
        (
            lambda: attnkit.General(torch.ones(11, 11)),
            "weight of General would not be a parameter.*attnkit.learned_scores.GeneralScore$",
        ),
        (
            lambda: ScaledDot(torch.ones(2)),
            r"scale of ScaledDot would not be a parameter.*whose forward\(\) returns the score$",
        ),
        (
            lambda: learned_scores.GaussianScore(2, 11, initial_bandwidth=0.0),
            "initial_bandwidth: expected a positive number, got 0.0",
        ),
        (
            lambda: learned_scores.AdditiveScore(2, 11, activation="relu"),
            "activation: expected 'tanh' or 'leaky_relu', got 'relu'",
        ),
        (
            lambda: learned_scores.AdditiveScore(2, 11, negative_slope=0.5),
            "negative_slope: only the activation 'leaky_relu' has one, got 0.5 with 'tanh'",
        ),
    ],
)
def test_wrong_scores_are_named(score, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(DIM, 2, score=score())
