"""Context attention: parity with timm's global context, and what one query sees."""

import copy

import pytest
import torch
from timm.layers import GlobalContext
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import ContextAttention, SpatialAttention

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 12, 5, 7


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


def layer_of(fusion="add", **options):
    return ContextAttention(CHANNELS, reduction=4, fusion=fusion, **options)


def some(batch=BATCH, height=HEIGHT, width=WIDTH, channels=CHANNELS, **options):
    options = {"dtype": torch.float64, "requires_grad": True, **options}
    return torch.randn(batch, channels, height, width, **options)


def gradients(output, *wanted):
    weights = (torch.arange(output.numel()) % 17 - 8).view_as(output) / 8
    return torch.autograd.grad(output, wanted, weights.to(output.dtype))


@pytest.mark.parametrize("fusion", ["add", "scale"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_timms_global_context(fusion, dtype):
    theirs = randomised(
        GlobalContext(
            CHANNELS, fuse_add=fusion == "add", fuse_scale=fusion == "scale", rd_ratio=1 / 4
        )
    ).to(dtype)
    mlp = theirs.mlp_add if fusion == "add" else theirs.mlp_scale
    ours = layer_of(fusion, norm_eps=mlp.norm.eps).to(dtype)
    pairs = [
        (ours.query, theirs.conv_attn.weight),
        (ours.transform[0].weight, mlp.fc1.weight),
        (ours.transform[0].bias, mlp.fc1.bias),
        (ours.transform[1].weight, mlp.norm.weight),
        (ours.transform[1].bias, mlp.norm.bias),
        (ours.transform[3].weight, mlp.fc2.weight),
        (ours.transform[3].bias, mlp.fc2.bias),
    ]
    assert len(pairs) == len([*ours.parameters()]) == len([*theirs.parameters()]) - 1
    with torch.no_grad():
        for our, their in pairs:
            our.copy_(their.view_as(our))
    x = some(dtype=dtype)
    output, expected = ours(x), theirs(x)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    found = gradients(output, x, *(our for our, _ in pairs))
    wanted = gradients(expected, x, *(their for _, their in pairs), theirs.conv_attn.bias)
    for our, their in zip(found, wanted, strict=False):
        torch.testing.assert_close(
            our, their.view_as(our), rtol=10 * tolerance, atol=10 * tolerance
        )
    # the bias that they add to the scores and we do not cannot be learned
    assert wanted[-1].abs() < 10 * tolerance


def test_is_spatial_attention_whose_queries_are_one():
    """A bias alone for the queries, the identity for keys and values."""
    ours = randomised(layer_of())
    spatial = SpatialAttention(CHANNELS, score="dot", residual=None).double()
    identity = torch.eye(CHANNELS)
    with torch.no_grad():
        zeros = torch.zeros(CHANNELS)
        spatial.attention.in_proj.weight.copy_(torch.cat([0 * identity, identity, identity]))
        spatial.attention.in_proj.bias.copy_(torch.cat([ours.query[0], zeros, zeros]))
        spatial.attention.out_proj.weight.copy_(identity)
    x = some()
    context = spatial(x)
    expected = x + ours.transform(context.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(ours(x), expected)


def test_weights_are_a_map():
    layer = randomised(layer_of())
    x = some()
    with attnkit.capture_attention(layer) as weights, attnkit.record_backends(layer) as record:
        layer(x)
    (captured,) = weights[""]
    assert captured.shape == (BATCH, 1, 1, HEIGHT * WIDTH)
    scores = torch.einsum("c,bcyx->byx", layer.query[0], x)
    expected = scores.flatten(1).softmax(-1).unflatten(1, (HEIGHT, WIDTH))
    torch.testing.assert_close(captured.unflatten(-1, (HEIGHT, WIDTH))[:, 0, 0], expected)
    assert record.total() == {"flash": 1}
    layer.backend = "math"
    with attnkit.record_backends() as record:
        layer(x)
    assert record.total() == {"math": 1}
    with pytest.raises(IndexError, match="heads: there are 1, got 1"):
        layer.attention_weights(x, heads=1)


@pytest.mark.parametrize("fusion", ["add", "scale"])
def test_neighbours_in_the_batch_order_and_layout(fusion):
    layer = randomised(layer_of(fusion))
    x = some()
    output = layer(x)
    other = torch.cat([x[:1], 100 * some(2)])
    torch.testing.assert_close(layer(other)[:1], output[:1], rtol=1e-12, atol=1e-12)
    order = torch.randperm(HEIGHT * WIDTH)
    shuffled = layer(x.flatten(2)[..., order].view_as(x))
    torch.testing.assert_close(shuffled, output.flatten(2)[..., order].view_as(x))
    last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, output)
    assert output.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(copy.deepcopy(layer)(x), output)


@pytest.mark.parametrize("fusion", ["add", "scale"])
def test_begins_with_no_context(fusion):
    x = some()
    assert torch.equal(layer_of(fusion).double()(x), x if fusion == "add" else x / 2)


@pytest.mark.parametrize("fusion", ["add", "scale"])
def test_gradcheck(fusion):
    layer = randomised(ContextAttention(6, reduction=2, fusion=fusion))
    assert torch.autograd.gradcheck(layer, some(2, 2, 3, 6))


def test_compiled():
    torch._dynamo.reset()
    layer = randomised(layer_of("add"))
    x = some()
    output, expected = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)
    torch.testing.assert_close(output, expected)
    wanted = [x, *layer.parameters()]
    for ours, theirs in zip(gradients(output, *wanted), gradients(expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fusion", ["add", "scale"])
def test_autocast(fusion):
    layer = randomised(layer_of(fusion)).float()
    x = some(dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        layer.attention_weights(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=5e-2, atol=5e-2)
    (gradient,) = gradients(output, x)
    (exact,) = gradients(expected, x)
    assert (gradient - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("size", [(0, 5, 7), (1, 1, 1), (2, 1, 13)], ids=str)
def test_any_size(size):
    layer = randomised(layer_of())
    x = some(*size)
    output = layer(x)
    assert output.shape == x.shape
    assert all(gradient.isfinite().all() for gradient in gradients(output, x, *layer.parameters()))


def test_costs_what_it_says(flash_is_counted):
    layer = layer_of()
    hidden = CHANNELS // 4
    parameters = CHANNELS + 2 * CHANNELS * hidden + 3 * hidden + CHANNELS
    assert sum(p.numel() for p in layer.parameters()) == parameters
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, CHANNELS, HEIGHT, WIDTH))
    multiply_adds = 2 * HEIGHT * WIDTH * CHANNELS + 2 * CHANNELS * hidden
    assert counter.get_total_flops() == 2 * multiply_adds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": 0}, "reduction: expected at least 1, and at least 2 channels left of 12"),
        ({"reduction": 7}, "reduction: expected.*got 7"),
        ({}, "reduction: expected.*got 16"),
        ({"fusion": "multiply", "reduction": 2}, "fusion: expected 'add' or 'scale', got 'mult"),
        ({"backend": "flahs", "reduction": 2}, "backend: expected 'auto' or one of"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ContextAttention(CHANNELS, **options)


@pytest.mark.parametrize("shape", [(3, 12, 5), (3, 11, 5, 7)], ids=str)
def test_features_that_do_not_fit_are_named(shape):
    message = rf"features: expected \[batch, 12, .*one pixel, got \[{shape[0]}, {shape[1]}, "
    with pytest.raises(ValueError, match=message):
        layer_of()(torch.zeros(shape))
