"""Channel attention: parity with XCA, the papers' formulas, spatial attention of the transpose."""

import pytest
import torch
from layer_support import assert_same, randomised
from timm.models.xcit import XCA
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit import (
    ChannelAttention,
    CrossCovarianceAttention,
    SpatialAttention,
    TransposedAttention,
)

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 12, 5, 7

LAYERS = {
    "danet": lambda **o: ChannelAttention(CHANNELS, **o),
    "danet's code": lambda **o: ChannelAttention(CHANNELS, score=attnkit.ScaledDot(-1.0), **o),
    "xca": lambda **o: CrossCovarianceAttention(CHANNELS, num_heads=3, bias=True, **o),
    "transposed": lambda **o: TransposedAttention(CHANNELS, num_heads=2, **o),
}


def some(dtype=torch.float64):
    return torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_heads", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_timms_cross_covariance_attention(num_heads, bias, dtype):
    theirs = randomised(XCA(CHANNELS, num_heads=num_heads, qkv_bias=bias)).to(dtype)
    nn.init.uniform_(theirs.temperature, 0.5, 2.0)
    ours = CrossCovarianceAttention(CHANNELS, num_heads=num_heads, bias=bias, residual=None)
    state = {
        "in_proj.weight": theirs.qkv.weight[..., None, None],
        "out_proj.weight": theirs.proj.weight[..., None, None],
        "out_proj.bias": theirs.proj.bias,
        # their factor on the cosine is one over our temperature
        "score.log_temperature": -theirs.temperature.flatten().log(),
    }
    if bias:
        state["in_proj.bias"] = theirs.qkv.bias
    ours.to(dtype).load_state_dict(state)
    x = some(dtype)
    output, expected = ours(x), theirs(x.flatten(2).mT).mT.view_as(x)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    assert_same(
        output,
        expected,
        [x, ours.in_proj.weight, ours.out_proj.weight, ours.out_proj.bias],
        [x, theirs.qkv.weight, theirs.proj.weight, theirs.proj.bias],
        rtol=10 * tolerance,
        atol=10 * tolerance,
    )
    (found,) = torch.autograd.grad(ours(x).square().sum(), ours.score.log_temperature)
    expected = theirs(x.flatten(2).mT).square().sum()
    (wanted,) = torch.autograd.grad(expected, theirs.temperature)
    wanted = -(wanted * theirs.temperature).flatten()  # d temperature⁻¹ / d log temperature
    torch.testing.assert_close(found, wanted, rtol=50 * tolerance, atol=50 * tolerance)


@pytest.mark.parametrize("code", [False, True], ids=["paper", "code"])
def test_equals_danets_channel_attention(code):
    score = attnkit.ScaledDot(-1.0) if code else "dot"
    layer = randomised(ChannelAttention(CHANNELS, score=score))
    x = (0.5 * some()).detach().requires_grad_()
    maps = x.flatten(2)
    energy = torch.bmm(maps, maps.transpose(1, 2))
    if code:
        energy = energy.amax(dim=-1, keepdim=True) - energy
    weights = energy.softmax(dim=-1)
    expected = layer.residual.gamma * torch.bmm(weights, maps).view_as(x) + x
    assert_same(layer(x), expected, [x, layer.residual.gamma])
    torch.testing.assert_close(layer.attention_weights(x)[:, 0], weights)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_heads", [1, 6])
def test_equals_restormers_transposed_attention(num_heads, bias):
    layer = randomised(
        TransposedAttention(CHANNELS, num_heads=num_heads, bias=bias, residual="add")
    )
    x = some()
    pointwise, depthwise = layer.in_proj
    padded = F.pad(F.conv2d(x, pointwise.weight, pointwise.bias), (1, 1, 1, 1))
    qkv = sum(
        padded[:, :, i : i + HEIGHT, j : j + WIDTH] * depthwise.weight[:, 0, i, j, None, None]
        for i in range(3)
        for j in range(3)
    )
    if bias:
        qkv = qkv + depthwise.bias[:, None, None]
    query, key, value = (
        part.reshape(BATCH * num_heads, CHANNELS // num_heads, -1) for part in qkv.chunk(3, dim=1)
    )
    query, key = (part / part.norm(dim=-1, keepdim=True) for part in (query, key))
    factor = (-layer.score.log_temperature).exp().repeat(BATCH)[:, None, None]
    weights = (torch.bmm(query, key.transpose(1, 2)) * factor).softmax(dim=-1)
    output = torch.bmm(weights, value).reshape(x.shape)
    expected = x + F.conv2d(output, layer.out_proj.weight, layer.out_proj.bias)
    assert_same(layer(x), expected, [x, *layer.parameters()])
    captured = layer.attention_weights(x)
    torch.testing.assert_close(captured, weights.unflatten(0, (BATCH, num_heads)))


@pytest.mark.parametrize("score", ["dot", "scaled_dot", attnkit.Cosine(0.3), attnkit.Gaussian(2.0)])
def test_is_spatial_attention_of_the_transposed_map(score):
    """Whose pixels are our channels, with the identity for its projections."""
    layer, pixels = ChannelAttention(CHANNELS, score=score, residual=None), HEIGHT * WIDTH
    spatial = SpatialAttention(pixels, score=score, bias=False, residual=None).double()
    with torch.no_grad():
        spatial.attention.in_proj.weight.copy_(torch.eye(pixels).repeat(3, 1))
        spatial.attention.out_proj.weight.copy_(torch.eye(pixels))
    x = some()
    transposed = x.flatten(2).mT[..., None]  # [batch, pixels, channels, 1]
    assert_same(layer(x), spatial(transposed).squeeze(-1).mT.view_as(x), [x])


@pytest.mark.parametrize("name", LAYERS)
def test_pixels_may_change_places(name):
    """What a channel sees does not depend on the order of pixels, save for the convolution."""
    layer, x = randomised(LAYERS[name]()), some()
    order = torch.randperm(HEIGHT * WIDTH)
    shuffled = x.flatten(2)[..., order].view_as(x)
    expected = layer(x).flatten(2)[..., order].view_as(x)
    assert torch.allclose(layer(shuffled), expected) == (name != "transposed")


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_captured_and_kernels_chosen_and_recorded(name):
    layer, x = randomised(LAYERS[name]()), some()
    with attnkit.capture_attention(layer) as weights, attnkit.record_backends(layer) as record:
        layer(x)
    heads = getattr(layer, "num_heads", 1)
    (captured,) = weights[""]
    assert captured.shape == (BATCH, heads, CHANNELS // heads, CHANNELS // heads)
    torch.testing.assert_close(captured.sum(-1), torch.ones_like(captured[..., 0]))
    query, _, value = layer.project(x)
    assert query.shape == (BATCH, heads, CHANNELS // heads, HEIGHT * WIDTH)
    update = layer.out_proj((captured @ value).flatten(1, 2).view_as(x))
    torch.testing.assert_close(x + layer.residual.gamma * update, layer(x))
    assert record.total() == {"blockwise" if "code" in name else "flash": 1}
    some_rows = layer.attention_weights(x, rows=[2, 0], heads=0)
    torch.testing.assert_close(some_rows, captured[:, :1, [2, 0]])
    with pytest.raises(IndexError, match="rows: there are"):
        layer.attention_weights(x, rows=CHANNELS)
    with attnkit.record_backends() as record:
        LAYERS[name](backend="math").double()(x)
    assert record.total() == {"math": 1}
