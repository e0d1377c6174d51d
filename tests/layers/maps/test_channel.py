"""Channel attention: parity with XCA, the papers' formulas, spatial attention of the transpose."""

import copy

import pytest
import torch
from timm.models.xcit import XCA
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

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
    "scaled": lambda **o: ChannelAttention(CHANNELS, score="scaled_dot", **o),
    "xca": lambda **o: CrossCovarianceAttention(CHANNELS, num_heads=3, bias=True, **o),
    "transposed": lambda **o: TransposedAttention(CHANNELS, num_heads=2, **o),
}


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


def some(batch=BATCH, height=HEIGHT, width=WIDTH, channels=CHANNELS, **options):
    options = {"dtype": torch.float64, "requires_grad": True, **options}
    return torch.randn(batch, channels, height, width, **options)


def gradients(output, *wanted):
    weights = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    return torch.autograd.grad(output, wanted, weights.to(output.dtype))


def assert_equal(output, expected, wanted, others=None):
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(
        gradients(output, *wanted), gradients(expected, *(others or wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs.view_as(ours), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_heads", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_timms_cross_covariance_attention(num_heads, bias, dtype):
    theirs = randomised(XCA(CHANNELS, num_heads=num_heads, qkv_bias=bias)).to(dtype)
    nn.init.uniform_(theirs.temperature, 0.5, 2.0)
    ours = CrossCovarianceAttention(CHANNELS, num_heads=num_heads, bias=bias, residual=None)
    ours = ours.to(dtype)
    state = {
        "in_proj.weight": theirs.qkv.weight[..., None, None],
        "out_proj.weight": theirs.proj.weight[..., None, None],
        "out_proj.bias": theirs.proj.bias,
        # their factor on the cosine is one over our temperature
        "score.log_temperature": -theirs.temperature.flatten().log(),
    }
    if bias:
        state["in_proj.bias"] = theirs.qkv.bias
    ours.load_state_dict(state)
    x = some(dtype=dtype)
    expected = theirs(x.flatten(2).mT).mT.view_as(x)
    output = ours(x)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    found = gradients(output, x, ours.in_proj.weight, ours.out_proj.weight, ours.out_proj.bias)
    wanted = gradients(expected, x, theirs.qkv.weight, theirs.proj.weight, theirs.proj.bias)
    for our, their in zip(found, wanted, strict=True):
        torch.testing.assert_close(our, their.view_as(our), rtol=10 * tolerance, atol=tolerance)
    (found,) = gradients(ours(x), ours.score.log_temperature)
    (wanted,) = gradients(theirs(x.flatten(2).mT).mT.view_as(x), theirs.temperature)
    wanted = -(wanted * theirs.temperature).flatten()  # d temperature⁻¹ / d log temperature
    torch.testing.assert_close(found, wanted, rtol=10 * tolerance, atol=10 * tolerance)


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
    assert_equal(layer(x), expected, [x, layer.residual.gamma])
    torch.testing.assert_close(layer.attention_weights(x)[:, 0], weights)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 6])
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
    assert_equal(layer(x), expected, [x, *layer.parameters()])
    captured = layer.attention_weights(x)
    torch.testing.assert_close(captured, weights.unflatten(0, (BATCH, num_heads)))


def spatial_of_the_transpose(score, state=None):
    """Spatial attention whose pixels are our channels, with the identity for its projections."""
    pixels = HEIGHT * WIDTH
    spatial = SpatialAttention(pixels, score=score, bias=False, residual=None).double()
    with torch.no_grad():
        spatial.attention.in_proj.weight.copy_(torch.eye(pixels).repeat(3, 1))
        spatial.attention.out_proj.weight.copy_(torch.eye(pixels))
    return spatial


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "gaussian"])
def test_is_spatial_attention_of_the_transposed_map(score):
    score = {"cosine": attnkit.Cosine(0.3), "gaussian": attnkit.Gaussian(2.0)}.get(score, score)
    layer = ChannelAttention(CHANNELS, score=score, residual=None)
    spatial = spatial_of_the_transpose(score)
    x = some()
    transposed = x.flatten(2).mT[..., None]  # [batch, pixels, channels, 1]
    expected = spatial(transposed).squeeze(-1).mT.view_as(x)
    assert_equal(layer(x), expected, [x])


def test_cross_covariance_is_channel_attention_between_equal_projections():
    """The identity for queries, keys, values and output, one head, temperature 1."""
    layer = CrossCovarianceAttention(CHANNELS, num_heads=1, residual=None).double()
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.eye(CHANNELS).repeat(3, 1)[..., None, None])
        layer.out_proj.weight.copy_(torch.eye(CHANNELS)[..., None, None])
        layer.out_proj.bias.zero_()
    x = some()
    assert_equal(layer(x), ChannelAttention(CHANNELS, score="cosine", residual=None)(x), [x])


def test_transposed_is_cross_covariance_where_the_convolution_does_nothing():
    layer = randomised(TransposedAttention(CHANNELS, num_heads=2))
    other = CrossCovarianceAttention(CHANNELS, num_heads=2, out_bias=False).double()
    pointwise, depthwise = layer.in_proj
    nn.init.dirac_(depthwise.weight, groups=3 * CHANNELS)
    state = {name: p for name, p in layer.state_dict().items() if "in_proj" not in name}
    other.load_state_dict({**state, "in_proj.weight": pointwise.weight})
    x = some()
    assert_equal(layer(x), other(x), [x])


@pytest.mark.parametrize("name", LAYERS)
def test_pixels_may_change_places(name):
    """What a channel sees does not depend on the order of pixels, save for the convolution."""
    layer = randomised(LAYERS[name]())
    x = some()
    order = torch.randperm(HEIGHT * WIDTH)
    shuffled = x.flatten(2)[..., order].view_as(x)
    expected = layer(x).flatten(2)[..., order].view_as(x)
    assert torch.allclose(layer(shuffled), expected) == (name != "transposed")


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_captured_and_kernels_recorded(name):
    layer = randomised(LAYERS[name]())
    x = some()
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


@pytest.mark.parametrize("name", LAYERS)
def test_the_kernel_is_the_one_asked_for(name):
    layer = LAYERS[name](backend="math").double()
    with attnkit.record_backends() as record:
        layer(some())
    assert record.total() == {"math": 1}


@pytest.mark.parametrize("name", LAYERS)
def test_neighbours_in_the_batch_and_layout_change_nothing(name):
    layer = randomised(LAYERS[name]())
    x = some()
    output = layer(x)
    other = torch.cat([x[:1], 100 * some(2)])
    torch.testing.assert_close(layer(other)[:1], output[:1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x[1:2]), output[1:2], rtol=1e-12, atol=1e-12)
    last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, output)
    assert output.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(copy.deepcopy(layer)(x), output)


@pytest.mark.parametrize("name", LAYERS)
def test_gradcheck(name):
    channels = 4
    layer = {
        "xca": lambda: CrossCovarianceAttention(channels, num_heads=2),
        "transposed": lambda: TransposedAttention(channels, num_heads=2),
    }.get(name, lambda: ChannelAttention(channels, score=LAYERS[name]().score))()
    x = some(2, 2, 3, channels)
    assert torch.autograd.gradcheck(randomised(layer), x)


@pytest.mark.parametrize("name", ["danet's code", "transposed"])
def test_compiled(name):
    torch._dynamo.reset()
    layer = randomised(LAYERS[name]())
    x = some()
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert_equal(output, layer(x), [x, *layer.parameters()])


@pytest.mark.parametrize("name", [name for name in LAYERS if "danet" not in name])
def test_autocast(name):
    """Dot products of whole maps are too large for half precision to place: not DANet's."""
    layer = LAYERS[name]()
    nn.init.constant_(layer.residual.gamma, 0.5)
    x = some(dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    (gradient,) = gradients(output, x)
    (exact,) = gradients(expected, x)
    assert (gradient - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [(0, 5, 7), (1, 1, 1), (2, 1, 13)], ids=str)
def test_any_size(name, size):
    layer = randomised(LAYERS[name]())
    x = some(*size)
    output = layer(x)
    assert output.shape == x.shape
    assert all(gradient.isfinite().all() for gradient in gradients(output, x, *layer.parameters()))


@pytest.mark.parametrize("name", LAYERS)
def test_residual(name):
    x = some()
    begins = LAYERS[name]().double()
    assert torch.equal(begins(x), x)
    none, add = (LAYERS[name](residual=kind).double() for kind in (None, "add"))
    add.load_state_dict(none.state_dict())
    torch.testing.assert_close(add(x), x + none(x))


def test_costs_what_it_says(flash_is_counted):
    x = torch.randn(1, CHANNELS, HEIGHT, WIDTH)
    pixels, squares = HEIGHT * WIDTH, CHANNELS**2
    for layer, multiply_adds, parameters in (
        (ChannelAttention(CHANNELS), 2 * pixels * squares, 1),
        (
            CrossCovarianceAttention(CHANNELS, num_heads=3, bias=True),
            2 * pixels * squares // 3 + 4 * pixels * squares,
            4 * squares + 3 + 4 * CHANNELS + 1,
        ),
        (
            TransposedAttention(CHANNELS, num_heads=2),
            pixels * squares + 4 * pixels * squares + 27 * pixels * CHANNELS,
            4 * squares + 2 + 27 * CHANNELS + 1,
        ),
    ):
        assert sum(p.numel() for p in layer.parameters()) == parameters
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        assert counter.get_total_flops() == 2 * multiply_adds


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_of_the_weights_in_training_only(name):
    layer = randomised(LAYERS[name](dropout_p=0.5))
    plain = LAYERS[name]().double()
    plain.load_state_dict(layer.state_dict())
    x = some()
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), plain(x))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (ChannelAttention, {"channels": 0}, "channels: expected at least 1, got 0"),
        (ChannelAttention, {"score": "cosin"}, "score: expected one of scaled_dot.*got 'cosin'"),
        (ChannelAttention, {"score": "additive"}, "score: 'additive' has a tensor"),
        (
            ChannelAttention,
            {"score": attnkit.Cosine(torch.ones(1))},
            "score: the tensor temperature of Cosine would not be a parameter",
        ),
        (ChannelAttention, {"residual": "no"}, "residual: expected 'gamma', 'add' or None"),
        (ChannelAttention, {"dropout_p": 1.0}, "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
        (ChannelAttention, {"backend": "flahs"}, "backend: expected 'auto' or one of"),
        (CrossCovarianceAttention, {}, "num_heads: 8 does not divide channels 12"),
        (CrossCovarianceAttention, {"num_heads": 0}, "num_heads: 0 does not divide channels 12"),
        (TransposedAttention, {"num_heads": 5}, "num_heads: 5 does not divide channels 12"),
    ],
    ids=str,
)
def test_wrong_options_are_named(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(**{"channels": CHANNELS, **options})


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(3, 12, 5), (3, 11, 5, 7)], ids=str)
def test_features_that_do_not_fit_are_named(name, shape):
    message = rf"features: expected \[batch, 12, .*one pixel, got \[{shape[0]}, {shape[1]}, "
    with pytest.raises(ValueError, match=message):
        LAYERS[name]()(torch.zeros(shape))
