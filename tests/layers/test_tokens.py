"""Layers over tokens: the Transformer block, patch embedding and attention pooling."""

import pytest
import torch
import torch.nn.functional as F
from layer_support import assert_same, randomised
from timm.layers import AttentionPoolLatent
from torch import nn

import attnkit
from attnkit import AttentionPool, MultiHeadAttention, Packed, Padding, Rotary2d, ScaledDot
from attnkit.core.scores.learned import SCORE_NAMES
from attnkit.layers import PatchEmbedding, TransformerBlock
from attnkit.layers.transformer import make_mlp

BATCH, TOKENS, DIM, HEADS = 3, 7, 20, 5
LENGTHS = torch.tensor([7, 2, 5])
REAL = torch.arange(TOKENS) < LENGTHS[:, None]


def some(num_tokens=TOKENS, batch=BATCH):
    return torch.randn(batch, num_tokens, DIM, dtype=torch.float64, requires_grad=True)


def a_block(**options):
    return randomised(TransformerBlock(DIM, HEADS, **options))


@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "layer_scale": 0.1, "qkv_bias": False}])
def test_first_tokens_alone_are_the_first_tokens(query_tokens, options):
    block, tokens = a_block(**options), some()
    rotation = Rotary2d(4, (2, 3), num_prefix_tokens=1, dtype=torch.float64).rotation()
    whole = block(tokens, positions=rotation)[:, :query_tokens]
    first = block(tokens, query_tokens=query_tokens, positions=rotation.first_queries(query_tokens))
    assert_same(first, whole, [tokens, *block.parameters()], rtol=0, atol=1e-11)


@pytest.mark.parametrize("score", ["scaled_dot", "cosine", "additive", ScaledDot(softcap=0.5)])
def test_block_is_what_its_docstring_says(score):
    block, x = a_block(layer_scale=0.1, score=score), some()
    attention = MultiHeadAttention(DIM, HEADS, score=score).double()
    attention.load_state_dict(block.attention.state_dict())
    norm = block.attention_norm
    x1 = x + block.attention_scale.gamma * attention(
        F.layer_norm(x, (DIM,), *norm.parameters(), 1e-6)
    )
    normed = F.layer_norm(x1, (DIM,), *block.mlp_norm.parameters(), 1e-6)
    hidden = F.gelu(normed @ block.mlp.fc1.weight.T + block.mlp.fc1.bias)
    mlp = hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    expected = x1 + block.mlp_scale.gamma * mlp
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)
    plain = TransformerBlock(DIM, HEADS, layer_scale=0.1).double()
    plain.load_state_dict({k: v for k, v in block.state_dict().items() if ".score." not in k})
    assert torch.allclose(expected, plain(x), atol=1e-3) == (score == "scaled_dot")


def test_masked_tokens_change_nothing():
    block, tokens = a_block(), some()
    other = torch.cat([tokens[:, :5], some(2)], dim=1)
    mask = Padding(torch.full((BATCH,), 5))
    assert torch.equal(block(tokens, mask=mask)[:, :5], block(other, mask=mask)[:, :5])
    assert not torch.equal(block(tokens)[:, :5], block(other)[:, :5])


@pytest.mark.parametrize("option", ["dropout_p", "attention_dropout_p", "drop_path"])
def test_random_options_act_in_training_only(option):
    plain, tokens = a_block(), some(batch=31)
    block = TransformerBlock(DIM, HEADS, **{option: 0.5}).double()
    block.load_state_dict(plain.state_dict())
    assert torch.equal(block.eval()(tokens), plain(tokens))
    assert not torch.equal(block.train()(tokens), plain(tokens))


def test_drop_path_leaves_out_whole_samples_and_packed_sequences():
    """Also where several are in one item of the batch."""
    block, tokens = a_block(drop_path=0.75).train(), some(batch=64)
    untouched = (block(tokens) == tokens).flatten(1).all(dim=1).sum()
    assert 24 <= untouched <= 48  # 64 · 0.75² = 36, give or take 3 standard deviations
    lengths = torch.arange(40) % 3 + 1
    tokens = some(int(lengths.sum()), batch=1)
    kept = (block(tokens, mask=Packed(lengths)) == tokens).all(dim=2)[0].split(lengths.tolist())
    assert all(bool(part.all()) or not bool(part.any()) for part in kept)
    assert 0 < sum(bool(part.all()) for part in kept) < len(lengths)


def test_activations_and_hidden_size():
    mlp, x = make_mlp(6, 13 / 6), torch.linspace(-3, 3, 7)
    assert mlp.fc1.out_features == 13
    assert torch.equal(mlp.act(x), F.gelu(x))
    tanh = make_mlp(6, 2, activation="gelu_tanh").act(x)
    assert torch.equal(tanh, F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("bias", [True, False])
def test_patch_embedding_is_a_strided_convolution(bias):
    embedding = PatchEmbedding((3, 5), 2, 7, bias=bias).double()
    convolution = nn.Conv2d(2, 7, (3, 5), stride=(3, 5), bias=bias).double()
    convolution.load_state_dict(embedding.state_dict())  # one layout of names and shapes
    images = torch.randn(11, 2, 21, 65, dtype=torch.float64, requires_grad=True)
    theirs = convolution(images).flatten(2).transpose(1, 2)
    own, others = [images, *embedding.parameters()], [images, *convolution.parameters()]
    assert_same(embedding(images), theirs, own, others, rtol=0, atol=1e-11)
    embedding, convolution = PatchEmbedding((7, 7), 3, 512), nn.Conv2d(3, 512, 7, stride=7)
    torch.testing.assert_close(embedding.weight.std(), convolution.weight.std(), rtol=0.02, atol=0)
    assert embedding.weight.abs().max() <= 147**-0.5


def test_enlarging_image_and_patch_together_keeps_the_tokens():
    embedding, images = PatchEmbedding((5, 7), 2, 11), torch.randn(3, 2, 15, 35)
    before, weight = embedding(images), embedding.weight
    assert embedding.resize((5, 7)).weight is weight
    patches = images.view(3, 2, 3, 5, 5, 7).permute(0, 1, 2, 4, 3, 5)
    patches = patches.reshape(-1, 1, 5, 7)
    large = F.interpolate(patches, size=(10, 13), mode="bicubic", antialias=True)
    large = large.view(3, 2, 3, 5, 10, 13).permute(0, 1, 2, 4, 3, 5).reshape(3, 2, 30, 65)
    assert embedding.resize((10, 13)) is embedding
    assert embedding.weight.shape == (11, 2, 10, 13)
    torch.testing.assert_close(embedding(large), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_pooling_equals_timms(num_queries, qkv_bias):
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
    torch.testing.assert_close(ours(tokens), theirs(tokens))
    torch.testing.assert_close(ours(tokens, REAL), theirs(tokens, attn_mask=REAL[:, None, None]))


@pytest.mark.parametrize("num_queries", [None, 3])
def test_pooling_equals_torchs_attention_of_learned_queries(num_queries):
    theirs = randomised(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    ours = randomised(AttentionPool(DIM, HEADS, num_queries=num_queries))
    ours.attention = attnkit.interop.from_torch(theirs)
    tokens = some()
    expected, weights = theirs(ours.query.expand(BATCH, -1, -1), tokens, tokens,
                               key_padding_mask=~REAL, average_attn_weights=False)  # fmt: skip
    with attnkit.capture_attention(ours) as captured:
        pooled = ours(tokens, Padding(LENGTHS))
    assert pooled.shape == ((BATCH, DIM) if num_queries is None else (BATCH, 3, DIM))
    torch.testing.assert_close(captured["attention"][0], weights)
    own = [ours.attention.in_proj.weight, ours.attention.in_proj.bias,
           *ours.attention.out_proj.parameters()]  # fmt: skip
    assert_same(pooled, expected.view_as(pooled), own, [*theirs.parameters()], 1e-7, 1e-7)


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_padding_never_changes_what_is_pooled(score):
    pool = randomised(AttentionPool(DIM, HEADS, num_queries=2, mlp_ratio=2.0, score=score))
    tokens = some()
    alone = pool(tokens)
    for amount in (0, 2, 22):
        garbage = 1e4 * some(amount)
        padded = torch.cat([tokens, garbage], dim=1)
        lengths = torch.full((BATCH,), TOKENS)
        torch.testing.assert_close(pool(padded, Padding(lengths)), alone, rtol=0, atol=1e-12)
        real = torch.arange(TOKENS + amount) >= amount
        padded = torch.cat([garbage, tokens], dim=1)
        pooled = pool(padded, real.expand(BATCH, -1))
        torch.testing.assert_close(pooled, alone, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(pooled.square().sum(), padded)
    assert (gradient[:, :amount] == 0).all()
    assert (gradient[:, amount:].norm(dim=-1) > 0).all()


@pytest.mark.parametrize("score", SCORE_NAMES)
@pytest.mark.parametrize("mlp_ratio", [None, 2.0])
def test_pooling_is_attention_and_without_a_token_the_output_bias(score, mlp_ratio):
    pool = randomised(AttentionPool(DIM, HEADS, mlp_ratio=mlp_ratio, score=score))
    attention = MultiHeadAttention(DIM, HEADS, key_dim=DIM, score=score).double()
    attention.load_state_dict(pool.attention.state_dict())
    tokens, mask = some(), Padding(torch.tensor([7, 0, 2]))
    expected = attention(pool.query.expand(BATCH, -1, -1), tokens, mask=mask)[:, 0]
    torch.testing.assert_close(expected[1], attention.out_proj.bias)
    if mlp_ratio is not None:
        expected = expected + pool.mlp(pool.norm(expected))
    pooled = pool(tokens, mask)
    torch.testing.assert_close(pooled, expected)
    gradients = torch.autograd.grad(pooled.square().sum(), [tokens, *pool.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][1] == 0).all()
    torch.testing.assert_close(pool(some(0)), expected[1].expand(BATCH, DIM))


def test_pooling_ignores_the_order_of_tokens_and_feels_each():
    pool, tokens = randomised(AttentionPool(DIM, HEADS, mlp_ratio=4.0)), some()
    pooled = pool(tokens)
    torch.testing.assert_close(pool(tokens.flip(1)), pooled, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(pooled.square().sum(), tokens)
    assert (gradient.norm(dim=-1) > 1e-6).all()
    token = some(1)
    torch.testing.assert_close(pool(token.expand(-1, 11, -1)), pool(token), rtol=0, atol=1e-12)


def test_dropout_of_the_pools_weights_in_training_only():
    pool, tokens = randomised(AttentionPool(DIM, HEADS, dropout_p=0.5)), some()
    plain = AttentionPool(DIM, HEADS).double()
    plain.load_state_dict(pool.state_dict())
    assert torch.equal(pool(tokens), plain(tokens))
    assert not torch.equal(pool.train()(tokens), pool(tokens))


def test_pooling_compiled():
    torch._dynamo.reset()
    pool = randomised(AttentionPool(DIM, HEADS, num_queries=3, mlp_ratio=2.0))
    tokens, mask = some(), Padding(torch.tensor([7, 0, 2]))
    compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, mask), pool(tokens, mask))


def pooled(*given, **options):
    pool = AttentionPool(**{"dim": DIM, "num_heads": HEADS, **options})
    return pool(*given) if given else pool


def embedded(*shape, **options):
    return PatchEmbedding((5, 7), 2, 11)(torch.zeros(shape, **options))


WRONG = [
    (lambda: make_mlp(6, 2, activation="relu"), "activation: expected 'gelu' or 'gelu_tanh', got"),
    (lambda: embedded(2, 15, 35), r"images: expected \[batch, 2, height.*\[2, 15, 35\]"),
    (lambda: embedded(2, 3, 15, 35), r"images: expected \[batch, 2.*\[2, 3, 15, 35\]"),
    (lambda: embedded(2, 2, 15, 35, dtype=torch.uint8), "images: expected a floating.*torch.uint8"),
    (lambda: embedded(2, 2, 15, 36), ".*multiple of patch_size 5 x 7, got 15 x 36"),
    (lambda: pooled(num_queries=0), "num_queries: expected at least 1, got 0"),
    (lambda: pooled(num_heads=3), "num_heads: 3 does not divide dim 20"),
    (lambda: pooled(mlp_ratio=0.01), "mlp_ratio: expected at least one hidden channel, got 0.01"),
    (lambda: pooled(mlp_ratio=2.0, activation="relu"), "activation: expected 'gelu' or"),
    (lambda: pooled(activation="gelu"), "activation: only the MLP has one, got 'gelu' without mlp"),
    (lambda: pooled(norm_eps=1e-6), "norm_eps: only the MLP has one, got 1e-06 without mlp_ratio"),
    (lambda: pooled(score="cosin"), "score: expected one of scaled_dot.*got 'cosin'"),
    (lambda: pooled(torch.zeros(3, 20)), r"tokens: expected \[batch, tokens, 20\], got \[3, 20\]"),
    (lambda: pooled(torch.zeros(3, 7, 19)), r"tokens: expected .* 20\], got \[3, 7, 19\]"),
    (
        lambda: pooled(torch.zeros(3, 7, 20), torch.ones(1, 7, dtype=torch.bool)),
        r"mask: expected booleans \[3, 7\].*got torch.bool \[1, 7\]",
    ),
    (lambda: pooled(torch.zeros(3, 7, 20), torch.ones(3, 7)), "mask: expected bool.*torch.float32"),
    (lambda: pooled(torch.zeros(3, 7, 20), Padding(LENGTHS[:2])), "mask: Padding has the shape"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
