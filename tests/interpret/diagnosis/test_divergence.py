"""Entropy, divergence and rankings against SciPy and against closed forms."""

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy
from scipy.stats import kendalltau

from attnkit.interpret.head_measures import divergence_of_heads, entropy, static_score

BATCH, HEADS, ROWS, KEYS = 2, 3, 5, 11


@pytest.fixture
def weights():
    torch.manual_seed(1)
    return torch.randn(BATCH, HEADS, ROWS, KEYS).mul(2).softmax(dim=-1)


def test_entropy(weights):
    expected = torch.tensor(scipy_entropy(weights.double().numpy(), axis=-1))
    torch.testing.assert_close(entropy(weights).double(), expected, atol=1e-6, rtol=1e-6)
    assert entropy(torch.eye(KEYS)).tolist() == [0.0] * KEYS


def test_divergence_is_scipys(weights):
    is_row = torch.ones(BATCH, HEADS, ROWS, dtype=torch.bool)
    is_row[1, :, 3] = False
    by_head = weights.transpose(0, 1), is_row.transpose(0, 1)
    places = [(b, r) for b in range(BATCH) for r in range(ROWS) if is_row[b, 0, r]]
    expected = [
        sum(
            jensenshannon(weights[b, head, r], weights[b, other, r], base=2) ** 2
            for b, r in places
            for other in range(HEADS)
            if other != head
        )
        / (len(places) * (HEADS - 1))
        for head in range(HEADS)
    ]
    torch.testing.assert_close(
        divergence_of_heads(*by_head), torch.tensor(expected).float(), atol=1e-5, rtol=1e-5
    )


def test_heads_without_a_key_in_common_are_one_bit_apart():
    weights = torch.eye(HEADS).view(HEADS, 1, HEADS)
    is_row = torch.ones(HEADS, 1, dtype=torch.bool)
    torch.testing.assert_close(divergence_of_heads(weights, is_row), torch.ones(HEADS))
    alike = weights[:1].expand(HEADS, -1, -1)
    assert divergence_of_heads(alike, is_row).tolist() == [0.0] * HEADS


def test_the_static_score_is_the_mean_of_scipys_taus(weights):
    score, count = static_score(weights)
    for b in range(BATCH):
        for head in range(HEADS):
            taus = [
                kendalltau(weights[b, head, i], weights[b, head, j]).statistic
                for i in range(ROWS)
                for j in range(i)
            ]
            assert float(score[b, head]) == pytest.approx(sum(taus) / len(taus), abs=1e-5)
    assert count.tolist() == [[10.0] * HEADS] * BATCH


def test_only_keys_that_both_queries_see_are_ranked():
    """Alike on the shared keys 2, 3, 4; the rest is seen by one."""
    one = torch.tensor([0.5, 0.2, 0.1, 0.15, 0.05, 0.0])
    other = torch.tensor([0.0, 0.0, 0.2, 0.3, 0.1, 0.4])
    assert static_score(torch.stack([one, other])) == (1.0, 1.0)
    against = torch.tensor([0.0, 0.0, 0.2, 0.1, 0.3, 0.4])
    assert static_score(torch.stack([one, against]))[0] == -1.0
    assert static_score(torch.stack([one, torch.full((6,), 1 / 6)])) == (0.0, 0.0)


def test_rounding_is_a_tie():
    one = torch.tensor([0.3, 0.3 * (1 + 1e-6), 0.2, 0.1])
    other = torch.tensor([0.3 * (1 + 1e-6), 0.3, 0.2, 0.1])
    assert static_score(torch.stack([one, other]))[0] == 1.0
