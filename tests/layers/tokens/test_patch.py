"""Patch embedding against a strided convolution, and FlexiViT's resize against its property."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnkit.layers import PatchEmbedding


@pytest.mark.parametrize("bias", [True, False])
def test_patch_embedding_is_a_strided_convolution(bias):
    embedding = PatchEmbedding((3, 5), 2, 7, bias=bias).double()
    convolution = nn.Conv2d(2, 7, (3, 5), stride=(3, 5), bias=bias).double()
    convolution.load_state_dict(embedding.state_dict())  # one layout of names and shapes
    images = torch.randn(11, 2, 21, 65, dtype=torch.float64, requires_grad=True)
    ours = embedding(images)
    theirs = convolution(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    probe = torch.randn_like(ours)
    our_grads = torch.autograd.grad(ours, [images, *embedding.parameters()], probe)
    their_grads = torch.autograd.grad(theirs, [images, *convolution.parameters()], probe)
    for our_grad, their_grad in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(our_grad, their_grad, rtol=0, atol=1e-11)


def test_start_values_have_the_spread_of_a_convolution():
    embedding, convolution = PatchEmbedding((7, 7), 3, 512), nn.Conv2d(3, 512, 7, stride=7)
    torch.testing.assert_close(embedding.weight.std(), convolution.weight.std(), rtol=0.02, atol=0)
    assert embedding.weight.abs().max() <= 147**-0.5


def test_enlarging_image_and_patch_together_keeps_the_tokens():
    embedding = PatchEmbedding((5, 7), 2, 11)
    images = torch.randn(3, 2, 15, 35)
    before = embedding(images)
    patches = images.view(3, 2, 3, 5, 5, 7).permute(0, 1, 2, 4, 3, 5)
    patches = patches.reshape(-1, 1, 5, 7)
    large = F.interpolate(patches, size=(10, 13), mode="bicubic", antialias=True)
    large = large.view(3, 2, 3, 5, 10, 13).permute(0, 1, 2, 4, 3, 5).reshape(3, 2, 30, 65)
    assert embedding.resize((10, 13)) is embedding
    assert embedding.weight.shape == (11, 2, 10, 13)
    torch.testing.assert_close(embedding(large), before, rtol=0, atol=1e-4)


def test_resizing_to_the_same_patch_keeps_the_parameter():
    embedding = PatchEmbedding((5, 7), 2, 11)
    weight = embedding.weight
    assert embedding.resize((5, 7)).weight is weight


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 15, 35), r"ValueError: images: expected \[batch, 2, height.*\[2, 15, 35\]"),
        (torch.zeros(2, 3, 15, 35), r"ValueError: images: expected \[batch, 2.*\[2, 3, 15, 35\]"),
        (torch.zeros(2, 2, 15, 35).byte(), "TypeError: images: expected a floating.*torch.uint8"),
        (torch.zeros(2, 2, 15, 36), "ValueError: .*multiple of patch_size 5 x 7, got 15 x 36"),
    ],
)
def test_bad_images(images, message):
    with pytest.raises((ValueError, TypeError)) as raised:
        PatchEmbedding((5, 7), 2, 11)(images)
    assert re.match(message, f"{raised.type.__name__}: {raised.value}")
