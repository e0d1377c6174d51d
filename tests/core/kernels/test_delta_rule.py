"""The delta rule in chunks: against its recurrence, token by token, and its weights."""

import pytest
import support
import torch
from torch.nn import functional as F

import attnkit
from attnkit import Causal, DeltaRule, Padding, attend, delta_rule
from attnkit.core.kernels import linear
from attnkit.core.kernels.choose import UnsupportedError

BATCH, HEADS = 2, 6


def with_gradients(function, tensors, **options):
    return support.with_gradients(tensors, function, **options)


def make(tokens, head_dim=5, value_dim=3, kv_heads=2, dtype=torch.float64):
    """query, key, value, beta, state; keys of unit length."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, HEADS, tokens, head_dim),
        (BATCH, kv_heads, tokens, head_dim),
        (BATCH, kv_heads, tokens, value_dim),
        (BATCH, HEADS, tokens),
        (BATCH, HEADS, head_dim, value_dim),
    ]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[1] = F.normalize(tensors[1], dim=-1)
    tensors[3] = tensors[3].sigmoid()
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def token_by_token(query, key, value, beta, state):
    """The formula, a token after the other."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for t in range(query.shape[2]):
        k, v, b = key[:, :, t], value[:, :, t], beta[:, :, t, None]
        missing = v - torch.einsum("bhkv,bhk->bhv", state, k)
        state = state + torch.einsum("bhk,bhv->bhkv", k, b * missing)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, :, t]))
    return torch.stack(outputs, dim=2), state


@pytest.fixture(params=[False, True], ids=["one segment", "segments"])
def in_small_segments(request, monkeypatch):
    if request.param:
        monkeypatch.setitem(linear.SEGMENT_ELEMENTS, "cpu", 1)


@pytest.mark.parametrize(
    ("tokens", "chunk_size"), [(1, 7), (7, 1), (7, 7), (67, 7), (67, 64), (131, 64), (131, 200)]
)
def test_chunks_are_the_recurrence(tokens, chunk_size, in_small_segments):
    tensors = make(tokens)
    expected = with_gradients(token_by_token, tensors)
    actual = with_gradients(delta_rule, tensors, chunk_size=chunk_size)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("pieces", [[1] * 23, [7, 5, 11], [22, 1], [0, 23]], ids=str)
def test_going_on_from_the_state_equals_all_at_once(pieces):
    query, key, value, beta, _ = make(23)
    together, last = delta_rule(query, key, value, beta, chunk_size=4)
    outputs, state = [], None
    for piece in zip(*(t.split(pieces, dim=2) for t in (query, key, value, beta)), strict=True):
        output, state = delta_rule(*piece, state, chunk_size=3)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=2), together)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("tokens", [5, 131])
@pytest.mark.parametrize(
    ("kv_heads", "padding"), [(1, None), (2, "right"), (6, "left"), (2, "some")]
)
def test_the_kernel_is_the_definition(tokens, kv_heads, padding, in_small_segments):
    *tensors, beta, _ = make(tokens, 7, 3, kv_heads)
    some = torch.rand(BATCH, tokens, generator=torch.Generator().manual_seed(1)) > 0.5
    mask = Causal()
    if padding is not None:
        mask = mask & Padding(
            {
                "right": torch.tensor([tokens - 2, 0]),
                "left": torch.arange(tokens) >= torch.tensor([[2], [tokens]]),
                "some": some,
            }[padding]
        )

    def function(query, key, value, beta, backend):
        return attend(query, key, value, mask=mask, normalizer=DeltaRule(beta), backend=backend)

    actual = with_gradients(function, [*tensors, beta], backend="delta_rule")
    expected = with_gradients(function, [*tensors, beta], backend="reference")
    assert all(result.isfinite().all() for result in actual)
    torch.testing.assert_close(actual, expected)
    if padding in ("right", "left"):
        for result in actual[:3]:  # the second item has padding alone
            assert (result[1] == 0).all()
    query, key, value = tensors
    weights = attnkit.attention_weights(query, key, mask=mask, normalizer=DeltaRule(beta))
    torch.testing.assert_close(actual[0], weights @ value.repeat_interleave(HEADS // kv_heads, 1))


def test_what_is_in_the_padding_changes_nothing(in_small_segments):
    query, key, value, beta, _ = make(71, dtype=torch.float32)
    real = torch.zeros(BATCH, 71, dtype=torch.bool)
    real[0, :13], real[1, 11:] = True, True
    fake = ~real[:, None, :, None]
    tensors = [query.detach().requires_grad_()]
    tensors += [t.detach().masked_fill(fake, 1e4).requires_grad_() for t in (key, value)]
    output = attend(*tensors, mask=Causal() & Padding(real), normalizer=DeltaRule(beta))
    loss = sum(output[i, :, real[i]].square().sum() for i in range(BATCH))
    gradients = torch.autograd.grad(loss, [*tensors, beta])
    for gradient in gradients[1:]:
        assert (gradient.movedim(2, 1)[~real] == 0).all()
        assert (gradient.movedim(2, 1)[real] != 0).any()
    for item, tokens in ((0, slice(0, 13)), (1, slice(11, 71))):
        alone = [t[item : item + 1, :, tokens] for t in (query, key, value, beta)]
        expected = attend(*alone[:3], mask=Causal(), normalizer=DeltaRule(alone[3]))
        torch.testing.assert_close(output[item : item + 1, :, tokens], expected)


@pytest.mark.parametrize("chunk_size", [2, 64])
def test_derivatives_of_every_order(chunk_size, in_small_segments):
    tensors = [t[:1, : t.shape[1] // 2].detach().requires_grad_() for t in make(5, 3, 2)]

    def function(*tensors):
        return delta_rule(*tensors, chunk_size=chunk_size)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_the_memory_is_not_rounded_to_half_precision():
    """512 tokens in bfloat16, each a small correction of what is there."""
    query, key, value, beta, _ = make(512, dtype=torch.bfloat16)
    output, memory = delta_rule(query, key, value, beta)
    assert (output.dtype, memory.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = delta_rule(*(tensor.double() for tensor in (query, key, value, beta)))
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("alike", [False, True], ids=["", "one key"])
def test_long_sequences_stay_bounded(beta, alike):
    """16,384 tokens in float32, each key new and all the same."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 16_384, 16, generator=generator) for _ in range(3))
    key = F.normalize(key[:, :, :1].expand_as(key) if alike else key, dim=-1).requires_grad_()
    value.requires_grad_()
    betas = torch.full((1, 1, 16_384), beta, requires_grad=True)
    output, state = delta_rule(query, key, value, betas)
    gradients = torch.autograd.grad(output.square().mean(), (key, value, betas))
    assert all(result.isfinite().all() for result in (output, state, *gradients))
    assert state.norm() <= 16 * value.norm(dim=-1).max()
    exact = (t.detach().double() for t in (query, key, value, betas))
    torch.testing.assert_close(delta_rule(*exact)[0].float(), output, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1e-12, 1e-17, 1e-21])
def test_features_of_tiny_vectors_have_finite_gradients(size):
    tokens = (size * torch.tensor([1.0, -2.0, 3.0])).requires_grad_()
    features = DeltaRule.features(tokens)
    unit = torch.tensor([1.0, -2.0, 3.0]) / 14**0.5
    torch.testing.assert_close(features, unit, atol=1e-3, rtol=0)
    (gradient,) = torch.autograd.grad(features[0], tokens)
    exact = (torch.tensor([1.0, 0, 0]) - unit[0] * unit) / (size * 14**0.5)
    torch.testing.assert_close(gradient, exact, atol=0, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend, monkeypatch):
    monkeypatch.setitem(linear.SEGMENT_ELEMENTS, "cpu", 1)
    torch._dynamo.reset()
    *tensors, _ = make(67, dtype=torch.float32)

    def function(query, key, value, beta):
        mask = Causal() & Padding(torch.tensor([67, 31]))
        output, state = delta_rule(query, key, value, beta)
        return output + attend(query, key, value, mask=mask, normalizer=DeltaRule(beta)), state

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = with_gradients(function, tensors)
    torch.testing.assert_close(with_gradients(compiled, tensors), expected, atol=1e-4, rtol=1e-4)


def test_broadcast_beta_and_no_tokens():
    query, key, value, beta, state = make(11)
    shared = beta[:1, :1]
    expected = delta_rule(query, key, value, shared.expand_as(beta), state)
    torch.testing.assert_close(delta_rule(query, key, value, shared, state), expected)
    none = [tensor[:, :, :0] for tensor in (query, key, value, beta)]
    output, last = delta_rule(*none, state)
    assert output.shape == (BATCH, HEADS, 0, 3)
    torch.testing.assert_close(last, state)


def test_what_it_refuses():
    query, key, value, beta, state = make(11)
    for change, message in (
        ({"state": state[:, :2]}, r"state: expected \[batch, heads, head_dim, value_dim\] = \["),
        ({"state": state.long()}, "state: expected a floating-point tensor, got torch.int64"),
        ({"state": state.to("meta")}, "state: is on meta, but query is on cpu"),
        ({"beta": beta[..., :5]}, r"beta: expected \[batch, heads, keys\] = \[2, 6, 11\], got"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"query": query[:, :, :7]}, "key: the delta rule has as many keys as queries, got 11 and"),
        ({"key": key[..., :3]}, "key: expected query's head_dim 5, got 3"),
        ({"value": value.float()}, "value: is torch.float32 on cpu, but query is torch.float64"),
    ):
        arguments = {"query": query, "key": key, "value": value, "beta": beta} | change
        with pytest.raises((ValueError, TypeError), match=message):
            delta_rule(**arguments)
    options = {"mask": Causal(), "normalizer": DeltaRule(beta)}
    assert attnkit.explain_backends(query, key, value, **options).chosen == "delta_rule"
    explained = attnkit.explain_backends(query, key, value, dropout_p=0.5, **options)
    assert explained.chosen == "reference"
    assert explained.reasons["delta_rule"] == ["has no dropout, got dropout_p=0.5"]
    with pytest.raises(UnsupportedError, match="needs the normalizer DeltaRule, got Softmax"):
        attend(query, key, value, mask=Causal(), backend="delta_rule")
