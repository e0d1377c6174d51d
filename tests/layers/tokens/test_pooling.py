"""Attention pooling: parity, what changes nothing, and what must."""

import pytest
import torch
from timm.layers import AttentionPoolLatent
from torch import nn

import attnkit
from attnkit import AttentionPool, Padding
from attnkit.core.scores.learned import SCORE_NAMES

BATCH, TOKENS, DIM, HEADS = 3, 7, 20, 5


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


def some(num_tokens=TOKENS, **options):
    return torch.randn(BATCH, num_tokens, DIM, dtype=torch.float64, **options)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_equals_timm(num_queries, qkv_bias):
    """With no `pool_type`, timm's gives back all of its latents."""
    theirs = randomised(
        AttentionPoolLatent(DIM, num_heads=HEADS, latent_len=num_queries, qkv_bias=qkv_bias,
                            mlp_ratio=2.0, norm_layer=nn.LayerNorm, pool_type="")
    )  # fmt: skip
    ours = AttentionPool(
        DIM, HEADS, num_queries=num_queries, mlp_ratio=2.0, qkv_bias=qkv_bias, norm_eps=1e-5
    ).double()
    state = theirs.state_dict()
    state["query"] = state.pop("latent")
    for kind in ("weight", "bias") if qkv_bias else ("weight",):
        state[f"attention.query_proj.{kind}"] = state.pop(f"q.{kind}")
        key, value = state.pop(f"kv.{kind}").chunk(2)
        state[f"attention.key_proj.{kind}"], state[f"attention.value_proj.{kind}"] = key, value
    for kind in ("weight", "bias"):
        state[f"attention.out_proj.{kind}"] = state.pop(f"proj.{kind}")
    ours.load_state_dict(state)
    tokens = some()
    real = torch.arange(TOKENS) < torch.tensor([7, 2, 5])[:, None]
    torch.testing.assert_close(ours(tokens), theirs(tokens))
    torch.testing.assert_close(ours(tokens, real), theirs(tokens, attn_mask=real[:, None, None]))


@pytest.mark.parametrize("num_queries", [None, 3])
def test_equals_torchs_attention_of_learned_queries(num_queries):
    theirs = randomised(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    ours = randomised(AttentionPool(DIM, HEADS, num_queries=num_queries))
    ours.attention = attnkit.interop.from_torch(theirs)
    tokens = some()
    lengths = torch.tensor([7, 2, 5])
    hidden = torch.arange(TOKENS) >= lengths[:, None]
    expected, weights = theirs(ours.query.expand(BATCH, -1, -1), tokens, tokens,
                               key_padding_mask=hidden, average_attn_weights=False)  # fmt: skip
    with attnkit.capture_attention(ours) as captured:
        pooled = ours(tokens, Padding(lengths))
    assert pooled.shape == ((BATCH, DIM) if num_queries is None else (BATCH, 3, DIM))
    torch.testing.assert_close(pooled, expected.view_as(pooled))
    torch.testing.assert_close(captured["attention"][0], weights)
    wanted = list(theirs.parameters())
    for our, their in zip(
        torch.autograd.grad(pooled.square().sum(), [
            ours.attention.in_proj.weight, ours.attention.in_proj.bias,
            *ours.attention.out_proj.parameters(),
        ]),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(our, their)


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_score_is_that_of_the_attention(score):
    pool = randomised(AttentionPool(DIM, HEADS, num_queries=3, score=score))
    attention = attnkit.MultiHeadAttention(DIM, HEADS, key_dim=DIM, score=score).double()
    attention.load_state_dict(pool.attention.state_dict())
    tokens = some()
    assert torch.equal(pool(tokens), attention(pool.query.expand(BATCH, -1, -1), tokens))


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_padding_never_changes_what_is_pooled(score):
    pool = randomised(AttentionPool(DIM, HEADS, num_queries=2, mlp_ratio=2.0, score=score))
    tokens = some()
    alone = pool(tokens)
    for amount in (0, 1, 2, 9, 22):
        garbage = 1e4 * some(amount)
        padded = torch.cat([tokens, garbage], dim=1)
        lengths = torch.full((BATCH,), TOKENS)
        torch.testing.assert_close(pool(padded, Padding(lengths)), alone, rtol=0, atol=1e-12)
        real = torch.arange(TOKENS + amount) >= amount
        padded = torch.cat([garbage, tokens], dim=1).requires_grad_()
        pooled = pool(padded, real.expand(BATCH, -1))
        torch.testing.assert_close(pooled, alone, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(pooled.square().sum(), padded)
    assert (gradient[:, :amount] == 0).all()
    assert (gradient[:, amount:].norm(dim=-1) > 0).all()


@pytest.mark.parametrize("score", SCORE_NAMES)
@pytest.mark.parametrize("mlp_ratio", [None, 2.0])
def test_an_item_without_a_token_is_the_output_bias(score, mlp_ratio):
    pool = randomised(AttentionPool(DIM, HEADS, mlp_ratio=mlp_ratio, score=score))
    tokens = some(requires_grad=True)
    pooled = pool(tokens, Padding(torch.tensor([7, 0, 2])))
    expected = bias = pool.attention.out_proj.bias
    if mlp_ratio is not None:
        expected = bias + pool.mlp(pool.norm(bias))
    torch.testing.assert_close(pooled[1], expected)
    gradients = torch.autograd.grad(pooled.square().sum(), [tokens, *pool.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][1] == 0).all()
    torch.testing.assert_close(pool(some(0)), expected.expand(BATCH, DIM))


def test_ignores_the_order_of_tokens_and_feels_each():
    pool = randomised(AttentionPool(DIM, HEADS, mlp_ratio=4.0))
    tokens = some(requires_grad=True)
    pooled = pool(tokens)
    torch.testing.assert_close(pool(tokens.flip(1)), pooled, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(pooled.square().sum(), tokens)
    assert (gradient.norm(dim=-1) > 1e-6).all()
    token = some(1)
    torch.testing.assert_close(pool(token.expand(-1, 11, -1)), pool(token), rtol=0, atol=1e-12)


def test_queries_pool_each_for_themselves():
    many = randomised(AttentionPool(DIM, HEADS, num_queries=3, mlp_ratio=2.0))
    one = AttentionPool(DIM, HEADS, mlp_ratio=2.0).double()
    tokens = some()
    pooled = many(tokens)
    for row in range(3):
        one.load_state_dict({**many.state_dict(), "query": many.query[:, row : row + 1]})
        torch.testing.assert_close(one(tokens), pooled[:, row])
    assert not torch.allclose(pooled[:, 0], pooled[:, 1])


def test_dropout_of_the_weights_in_training_only():
    pool = randomised(AttentionPool(DIM, HEADS, dropout_p=0.5))
    tokens = some()
    assert not torch.equal(pool(tokens), pool(tokens))
    plain = AttentionPool(DIM, HEADS).double()
    plain.load_state_dict(pool.state_dict())
    assert torch.equal(pool.eval()(tokens), plain(tokens))


def test_compiled():
    torch._dynamo.reset()
    pool = randomised(AttentionPool(DIM, HEADS, num_queries=3, mlp_ratio=2.0))
    tokens, mask = some(), Padding(torch.tensor([7, 0, 2]))
    compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, mask), pool(tokens, mask))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_queries": 0}, "num_queries: expected at least 1, got 0"),
        ({"num_heads": 3}, "num_heads: 3 does not divide dim 20"),
        (
            {"mlp_ratio": 0.01},
            "mlp_ratio: expected at least one hidden channel, got 0.01",
        ),
        ({"mlp_ratio": 2.0, "activation": "relu"}, "activation: expected 'gelu' or"),
        ({"activation": "gelu"}, "activation: only the MLP has one, got 'gelu' without mlp_ratio"),
        ({"norm_eps": 1e-6}, "norm_eps: only the MLP has one, got 1e-06 without mlp_ratio"),
        ({"score": "cosin"}, "score: expected one of scaled_dot.*got 'cosin'"),
        ({"dropout_p": 1.0}, "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionPool(**{"dim": DIM, "num_heads": HEADS, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 20),), r"tokens: expected \[batch, tokens, 20\], got \[3, 20\]"),
        ((torch.zeros(3, 7, 19),), r"tokens: expected \[batch, tokens, 20\], got \[3, 7, 19\]"),
        (
            (torch.zeros(3, 7, 20), torch.ones(1, 7, dtype=torch.bool)),
            r"mask: expected booleans \[3, 7\].*got torch.bool \[1, 7\]",
        ),
        ((torch.zeros(3, 7, 20), torch.ones(3, 7)), "mask: expected booleans.*got torch.float32"),
        ((torch.zeros(3, 7, 20), Padding(torch.tensor([1, 2]))), r"mask: Padding has the shape"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionPool(DIM, HEADS)(*arguments)
