"""The block: the first tokens alone, and each option felt."""

import pytest
import torch
import torch.nn.functional as F

from attnkit import MultiHeadAttention, Packed, Padding, Rotary2d, ScaledDot
from attnkit.layers import TransformerBlock
from attnkit.layers.transformer import make_mlp


def randomised(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double()


@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "layer_scale": 0.1, "qkv_bias": False}])
def test_first_tokens_alone_are_the_first_tokens(query_tokens, options):
    block = randomised(TransformerBlock(20, 5, **options))
    tokens = torch.randn(2, 7, 20, dtype=torch.float64, requires_grad=True)
    rotation = Rotary2d(4, (2, 3), num_prefix_tokens=1, dtype=torch.float64).rotation()
    whole = block(tokens, positions=rotation)[:, :query_tokens]
    first = block(tokens, query_tokens=query_tokens, positions=rotation.first_queries(query_tokens))
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-12)
    probe = torch.randn_like(first)
    inputs = [tokens, *block.parameters()]
    for ours, expected in zip(
        torch.autograd.grad(first, inputs, probe),
        torch.autograd.grad(whole, inputs, probe),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


def test_block_is_what_its_docstring_says():
    block = randomised(TransformerBlock(20, 5, layer_scale=0.1))
    x = torch.randn(2, 7, 20, dtype=torch.float64)
    normed = F.layer_norm(x, (20,), block.attention_norm.weight, block.attention_norm.bias, 1e-6)
    x1 = x + block.attention_scale.gamma * block.attention(normed)
    normed = F.layer_norm(x1, (20,), block.mlp_norm.weight, block.mlp_norm.bias, 1e-6)
    hidden = F.gelu(normed @ block.mlp.fc1.weight.T + block.mlp.fc1.bias)
    mlp = hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    torch.testing.assert_close(block(x), x1 + block.mlp_scale.gamma * mlp, rtol=0, atol=1e-12)


def test_masked_tokens_change_nothing():
    block = randomised(TransformerBlock(20, 5))
    tokens = torch.randn(2, 7, 20, dtype=torch.float64)
    other = tokens.clone()
    other[:, 5:] = torch.randn(2, 2, 20, dtype=torch.float64)
    mask = Padding(torch.tensor([5, 5]))
    assert torch.equal(block(tokens, mask=mask)[:, :5], block(other, mask=mask)[:, :5])
    assert not torch.equal(block(tokens)[:, :5], block(other)[:, :5])


@pytest.mark.parametrize("score", ["cosine", "additive", ScaledDot(softcap=0.5)], ids=str)
def test_score_is_that_of_the_attention(score):
    block = randomised(TransformerBlock(20, 5, score=score))
    attention = MultiHeadAttention(20, 5, score=score).double()
    attention.load_state_dict(block.attention.state_dict())
    x = torch.randn(2, 7, 20, dtype=torch.float64)
    x1 = x + attention(block.attention_norm(x))
    output = block(x)
    assert torch.equal(output, x1 + block.mlp(block.mlp_norm(x1)))
    plain = TransformerBlock(20, 5).double()
    plain.load_state_dict({k: v for k, v in block.state_dict().items() if ".score." not in k})
    assert not torch.allclose(output, plain(x), atol=1e-3)


@pytest.mark.parametrize("option", ["dropout_p", "attention_dropout_p", "drop_path"])
def test_random_options_act_in_training_only(option):
    plain = randomised(TransformerBlock(20, 5))
    block = TransformerBlock(20, 5, **{option: 0.5}).double()
    block.load_state_dict(plain.state_dict())
    tokens = torch.randn(31, 7, 20, dtype=torch.float64)
    assert torch.equal(block.eval()(tokens), plain(tokens))
    assert not torch.equal(block.train()(tokens), plain(tokens))


def test_drop_path_leaves_out_whole_samples():
    block = randomised(TransformerBlock(20, 5, drop_path=0.75)).train()
    tokens = torch.randn(64, 7, 20, dtype=torch.float64)
    untouched = (block(tokens) == tokens).flatten(1).all(dim=1).sum()
    assert 24 <= untouched <= 48  # 64 · 0.75² = 36, give or take 3 standard deviations


def test_drop_path_leaves_out_whole_packed_sequences():
    """Also where several are in one item of the batch."""
    block = randomised(TransformerBlock(20, 5, drop_path=0.75)).train()
    lengths = torch.arange(40) % 3 + 1
    tokens = torch.randn(1, int(lengths.sum()), 20, dtype=torch.float64)
    kept = (block(tokens, mask=Packed(lengths)) == tokens).all(dim=2)[0].split(lengths.tolist())
    assert all(bool(part.all()) or not bool(part.any()) for part in kept)
    assert 0 < sum(bool(part.all()) for part in kept) < len(lengths)


def test_activations_and_hidden_size():
    mlp = make_mlp(6, 13 / 6)
    assert mlp.fc1.out_features == 13
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(mlp.act(x), F.gelu(x))
    tanh = make_mlp(6, 2, activation="gelu_tanh").act(x)
    assert torch.equal(tanh, F.gelu(x, approximate="tanh"))
    with pytest.raises(ValueError, match="activation: expected 'gelu' or 'gelu_tanh', got 'relu'"):
        make_mlp(6, 2, activation="relu")
