"""Hard attention: one key, its estimators against exact expectations, and what it refuses."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import Causal, Hard, Padding, attend
from attnkit.core.kernels import recompute

ESTIMATORS = ["straight_through", "score_function", None]


def make(num_queries=5, num_keys=7, head_dim=3, value_dim=11, batch=2, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, heads, num_queries, head_dim),
        (batch, kv_heads, num_keys, head_dim),
        (batch, kv_heads, num_keys, value_dim),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.fixture(params=[False, True], ids=["one block", "blocks"])
def in_small_blocks(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", 50)


@pytest.mark.parametrize("mask", [None, Causal("top_left"), Padding(torch.tensor([7, 3]))])
def test_the_best_key_is_read(mask, in_small_blocks):
    query, key, value = make()
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, 1))
    if mask is not None:
        scores = scores.masked_fill(~mask.dense(5, 7, scores.device), -torch.inf)
    rows = F.one_hot(scores.argmax(-1), 7).double() @ value.repeat_interleave(2, 1)
    for backend in ("hard", "reference"):
        output = attend(query, key, value, mask=mask, normalizer=Hard(None), backend=backend)
        torch.testing.assert_close(output, rows, atol=0, rtol=0)
        expected = torch.autograd.grad(rows.square().sum(), value, retain_graph=True)
        actual = torch.autograd.grad(output.square().sum(), value)
        torch.testing.assert_close(actual, expected)
    weights = attnkit.attention_weights(query, key, mask=mask, normalizer=Hard(None))
    torch.testing.assert_close(weights, F.one_hot(scores.argmax(-1), 7).double())


def test_straight_through_is_torchs_gumbel_softmax():
    query, key, value = make(kv_heads=4)
    torch.manual_seed(3)
    output = attend(query, key, value, normalizer=Hard(temperature=0.7))
    actual = torch.autograd.grad(output.square().sum(), (query, key, value))
    torch.manual_seed(3)
    scores = query @ key.transpose(-2, -1) / 3**0.5
    weights = F.gumbel_softmax(scores, tau=0.7, hard=True)
    # theirs gives the soft weights' gradient to the values' factor as well: the hard ones are exact
    expected = torch.autograd.grad((weights @ value).square().sum(), (query, key, value))
    torch.testing.assert_close(output, weights @ value)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("estimator", ["straight_through", "score_function"])
def test_the_backward_in_blocks_is_of_the_same_draw(estimator, monkeypatch):
    tensors = make()
    generator = torch.Generator().manual_seed(5)
    towards = torch.randn(2, 4, 5, 11, generator=generator, dtype=torch.float64)
    monkeypatch.setitem(recompute.BLOCK_SCORES, "cpu", 50)
    torch.manual_seed(7)
    with attnkit.record_draws() as draws:
        output = attend(*tensors, normalizer=Hard(estimator))
    loss = (output * towards).sum()
    if estimator == "score_function":
        assert len(draws) == 1
        weights = attnkit.attention_weights(*tensors[:2])
        chosen = weights.gather(-1, draws[0].index[..., None]).squeeze(-1).log()
        torch.testing.assert_close(draws[0].log_probability, chosen)
        torch.testing.assert_close(draws[0].entropy, -(weights * weights.log()).sum(-1))
        index = draws[0].index[..., None].expand(-1, -1, -1, 11)
        torch.testing.assert_close(output, tensors[2].repeat_interleave(2, 1).gather(2, index))
        expected = torch.autograd.grad(chosen.sum() + loss, tensors, retain_graph=True)
        loss = loss + draws[0].log_probability.sum()
        torch.testing.assert_close(torch.autograd.grad(loss, tensors), expected)
    else:
        assert not draws
        gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
        # what is drawn again in the backward is what was drawn: another seed changes nothing
        torch.manual_seed(11)
        again = torch.autograd.grad(loss, tensors)
        torch.testing.assert_close(gradients, again, atol=0, rtol=0)
        assert gradients[0].abs().sum() > 0


def test_draws_follow_the_softmax():
    query, key, value = make(num_queries=1, num_keys=5, batch=1, heads=1, kv_heads=1)
    many = query.detach().expand(1, 1, 200_000, 3)
    with attnkit.record_draws() as draws:
        attend(many, key, value, normalizer=Hard("score_function"))
    share = draws[0].index.flatten().bincount(minlength=5) / 200_000
    weights = attnkit.attention_weights(query, key).flatten()
    # five standard deviations of a share
    assert ((share - weights).abs() < 5 * (weights * (1 - weights) / 200_000).sqrt()).all()
    probabilities = attnkit.attention_weights(query, key, normalizer="hard").flatten()
    torch.testing.assert_close(probabilities, weights)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rows_that_look_nowhere(estimator, in_small_blocks):
    tensors = make()
    mask = Padding(torch.tensor([7, 0]))
    with attnkit.record_draws() as draws:
        output = attend(*tensors, mask=mask, normalizer=Hard(estimator))
    loss = output.square().sum() + sum((d.log_probability + d.entropy).sum() for d in draws)
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    assert (output[1] == 0).all()
    assert (output[0] != 0).all()
    for gradient in gradients:
        assert gradient is None or (gradient.isfinite().all() and (gradient[1] == 0).all())
    for draw in draws:
        assert (draw.index[1] == -1).all()
        assert (draw.index[0] >= 0).all()
        assert (draw.log_probability[1] == 0).all()
        assert (draw.entropy[1] == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_keys_are_never_drawn(estimator):
    query, key, value = make(num_queries=1009)
    mask = Padding(torch.tensor([3, 5]))
    value = value.detach().clone()
    value[0, :, 3:], value[1, :, 5:] = torch.nan, torch.nan
    with torch.no_grad():
        output = attend(query, key, value, mask=mask, normalizer=Hard(estimator))
    if estimator == "straight_through":  # whose soft weights multiply every value
        value = value.nan_to_num(1e6)
        output = attend(query, key, value, mask=mask, normalizer=Hard(estimator))
        assert output.abs().max() < 1e5
    assert output.isfinite().all()


def test_dropout_is_of_the_one_weight():
    query, key, value = make(num_queries=10_007, batch=1, heads=1, kv_heads=1)
    ones = torch.ones_like(value)
    output = attend(query, key, ones, normalizer=Hard(None), dropout_p=0.25)
    assert set(output.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs((output[..., 0] == 0).double().mean() - 0.25) < 0.03


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("empty", ["batch", "num_queries", "num_keys", "value_dim"])
def test_nothing_to_look_at(estimator, empty):
    tensors = make(**{empty: 0})
    with attnkit.record_draws() as draws:
        output = attend(*tensors, normalizer=Hard(estimator))
    assert output.shape == (*tensors[0].shape[:3], tensors[2].shape[3])
    assert (output == 0).all()
    gradients = torch.autograd.grad(output.sum(), tensors, allow_unused=True)
    assert all(gradient is None or (gradient == 0).all() for gradient in gradients)
    assert len(draws) == (estimator == "score_function")
    for draw in draws:
        assert draw.index.shape == draw.log_probability.shape == tensors[0].shape[:3]
        assert empty != "num_keys" or (draw.index == -1).all()


def test_what_it_refuses():
    tensors = make()
    with pytest.raises(RuntimeError, match="they are not recorded"):
        attend(*tensors, normalizer=Hard("score_function"))
    with torch.no_grad():
        attend(*tensors, normalizer=Hard("score_function"))
    with pytest.raises(ValueError, match=r"estimator: expected .*got 'gumbel'"):
        Hard("gumbel")
    with pytest.raises(ValueError, match="temperature: expected a positive number, got 0"):
        Hard(temperature=0)
    with pytest.raises(ValueError, match="temperature: only 'straight_through' has one"):
        Hard("score_function", temperature=0.5)
    explained = attnkit.explain_backends(*tensors, normalizer="hard")
    assert explained.chosen == "hard"
    assert explained.reasons["flash"] == ["needs the normalizer Softmax, got Hard"]
    assert explained.reasons["reference"] == ["cannot sample keys"]
    assert explained.reasons["hard"] == []


@pytest.mark.parametrize("is_open_in_backward", [False, True], ids=["closed", "open"])
def test_draws_under_checkpointing_are_those_of_the_forward(is_open_in_backward):
    query = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)

    def attention(query):
        return attend(query, query, query, normalizer=attnkit.Hard("score_function"))

    def gradient(call):
        torch.manual_seed(0)
        with ExitStack() as stack:
            draws = stack.enter_context(attnkit.record_draws())
            output = call(query)
            if not is_open_in_backward:
                stack.close()
            loss = output.square().sum() + sum(draw.log_probability.sum() for draw in draws)
            (found,) = torch.autograd.grad(loss, query)
        assert len(draws) == 1
        return found

    torch.testing.assert_close(
        gradient(partial(checkpoint, attention, use_reentrant=False)), gradient(attention)
    )


def test_draws_in_a_reentrant_checkpoint_are_refused():
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    with attnkit.record_draws():
        output = checkpoint(
            lambda query: attend(query, query, query, normalizer=attnkit.Hard("score_function")),
            query,
            use_reentrant=True,
        )
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        output.sum().backward()
