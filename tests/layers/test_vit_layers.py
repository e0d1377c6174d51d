"""Patch embedding, the transformer block and attention pooling."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnkit.layers import AttentionPooling, PatchEmbedding, TransformerBlock

DIM, HEADS = 22, 11


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.double().eval()


@pytest.mark.parametrize("bias", [True, False])
def test_patch_embedding_is_a_strided_convolution(bias):
    embedding = randomised(PatchEmbedding((3, 5), 2, 7, bias=bias))
    images = torch.randn(3, 2, 9, 35, dtype=torch.float64)
    expected = F.conv2d(images, embedding.weight, embedding.bias, stride=(3, 5))
    torch.testing.assert_close(embedding(images), expected.flatten(2).transpose(1, 2))


def test_resized_patches_see_enlarged_images_alike():
    embedding = randomised(PatchEmbedding((4, 4), 3, 7))
    images = torch.rand(2, 3, 8, 12, dtype=torch.float64)
    before = embedding(images)
    enlarged = F.interpolate(images, scale_factor=2, mode="nearest")
    after = embedding.resize((8, 8))(enlarged)
    assert after.shape == before.shape
    # the resize is exact for bilinear enlargement of each patch, near for the whole image
    assert (after - before).norm() < 0.2 * before.norm()


@pytest.mark.parametrize("layer_scale", [None, 0.5])
@pytest.mark.parametrize("count", [1, 3])
def test_first_tokens_alone_are_exactly_those_of_all(layer_scale, count):
    block = randomised(TransformerBlock(DIM, HEADS, layer_scale=layer_scale, qk_norm=True))
    tokens = torch.randn(3, 7, DIM, dtype=torch.float64, requires_grad=True)
    some, full = block(tokens, query_tokens=count), block(tokens)[:, :count]
    torch.testing.assert_close(some, full)
    torch.testing.assert_close(
        torch.autograd.grad(some.square().sum(), [tokens, *block.parameters()]),
        torch.autograd.grad(full.square().sum(), [tokens, *block.parameters()]),
    )


def test_block_against_its_formula():
    block = randomised(TransformerBlock(DIM, HEADS, layer_scale=1.0))
    tokens = torch.randn(3, 7, DIM, dtype=torch.float64)
    after_attention = tokens + block.attention_scale.gamma * block.attention(
        block.attention_norm(tokens)
    )
    expected = after_attention + block.mlp_scale.gamma * block.mlp(block.mlp_norm(after_attention))
    torch.testing.assert_close(block(tokens), expected)


@pytest.mark.parametrize("option", ["dropout_p", "attention_dropout_p", "drop_path"])
def test_dropouts_act_in_training_only(option):
    block = TransformerBlock(DIM, HEADS, **{option: 0.5})
    plain = TransformerBlock(DIM, HEADS)
    plain.load_state_dict(block.state_dict())
    tokens = torch.randn(5, 7, DIM)
    assert not torch.allclose(block(tokens), plain(tokens))
    torch.testing.assert_close(block.eval()(tokens), plain(tokens))


def test_attention_pooling_ignores_the_order_of_tokens():
    pool = randomised(AttentionPooling(DIM, HEADS))
    tokens = torch.randn(3, 7, DIM, dtype=torch.float64)
    torch.testing.assert_close(pool(tokens), pool(tokens[:, torch.randperm(7)]))
    assert pool(tokens).shape == (3, DIM)
    uniform = tokens[:, :1].expand(-1, 7, -1)
    torch.testing.assert_close(pool(uniform), pool(tokens[:, :1]))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 9), r"images: shape \(2, 3, 9\), expected \[batch, 2, height, width\]"),
        (torch.zeros(2, 3, 9, 10), "expected .batch, 2, height, width."),
        (torch.zeros(2, 2, 9, 11), "images: 9 x 11 is not a multiple of patch_size 3 x 5"),
        (torch.zeros(2, 2, 9, 10, dtype=torch.uint8), "dtype torch.uint8, expected floating point"),
    ],
)
def test_wrong_images_are_named(images, message):
    with pytest.raises(ValueError, match=message):
        PatchEmbedding((3, 5), 2, 7)(images)


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match="activation: 'relu', expected one of"):
        TransformerBlock(DIM, HEADS, activation="relu")
