"""What holds of every layer over feature maps: sizes, batches, precision, costs, and messages."""

from copy import deepcopy

import pytest
import torch
from layer_support import PATTERNS, assert_same, randomised
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import (
    BAM,
    CBAM,
    SCSE,
    CBAMChannelGate,
    CBAMSpatialGate,
    ChannelAttention,
    Combined,
    ContextAttention,
    CoordinateAttention,
    CrossCovarianceAttention,
    EfficientChannelAttention,
    GatedSum,
    SpatialAttention,
    SpatialExcitation,
    SqueezeExcitation,
    TransposedAttention,
)

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 12, 5, 7

GATES = {
    "se": lambda: SqueezeExcitation(CHANNELS, reduction=4),
    "sse": lambda: SpatialExcitation(CHANNELS),
    "eca": lambda: EfficientChannelAttention(CHANNELS),
    "cbam channel": lambda: CBAMChannelGate(CHANNELS, reduction=4),
    "cbam spatial": lambda: CBAMSpatialGate(CHANNELS),
    "cbam spatial, paper's": lambda: CBAMSpatialGate(CHANNELS, batch_norm=False),
    "bam": lambda: BAM(CHANNELS, reduction=4, dilation=2),
    "coordinate": lambda: CoordinateAttention(CHANNELS),
    "cbam": lambda: CBAM(CHANNELS, reduction=4),
    "cbam, spatial first": lambda: CBAM(CHANNELS, reduction=4, order="spatial_first"),
    "scse": lambda: SCSE(CHANNELS),
    "scse, max": lambda: SCSE(CHANNELS, fusion="max"),
    "gated sum": lambda: Combined(
        nn.Conv2d(CHANNELS, CHANNELS, 1), nn.AvgPool2d(3, 1, 1), mode="gated_sum", channels=CHANNELS
    ),
}
CHANNEL = {
    "danet": lambda **o: ChannelAttention(CHANNELS, **o),
    "danet's code": lambda **o: ChannelAttention(CHANNELS, score=attnkit.ScaledDot(-1.0), **o),
    "scaled": lambda **o: ChannelAttention(CHANNELS, score="scaled_dot", **o),
    "xca": lambda **o: CrossCovarianceAttention(CHANNELS, num_heads=3, bias=True, **o),
    "transposed": lambda **o: TransposedAttention(CHANNELS, num_heads=2, **o),
}
SPATIAL = {
    name: lambda own=own, **o: SpatialAttention(CHANNELS, **own, **o)
    for name, own in PATTERNS.items()
}
CONTEXT = {
    fusion: lambda fusion=fusion, **o: ContextAttention(CHANNELS, reduction=4, fusion=fusion, **o)
    for fusion in ("add", "scale")
}
ATTENTION = CHANNEL | SPATIAL
LAYERS = GATES | ATTENTION | CONTEXT


def some(batch=BATCH, height=HEIGHT, width=WIDTH, dtype=torch.float64):
    return torch.randn(batch, CHANNELS, height, width, dtype=dtype, requires_grad=True)


def has_batch_norm(module):
    return any(isinstance(child, nn.BatchNorm2d) for child in module.modules())


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "edges"])  # of some edges
@pytest.mark.parametrize("size", [(0, 5, 7), (3, 1, 1), (2, 1, 13), (2, 17, 1)], ids=str)
def test_any_size(name, size):
    layer, x = randomised(LAYERS[name]()), some(*size)
    for training in (False, True) if len(x) else (False,):
        output = layer.train(training)(x)
        assert output.shape == x.shape
        wanted = [x, *layer.parameters()]
        found = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        assert all(gradient is None or gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("name", LAYERS)
def test_batches_layouts_and_copies(name):
    """Items see each other only through a batch norm in training."""
    layer, x = randomised(LAYERS[name]()), some()
    exact = {"rtol": 1e-12, "atol": 1e-12}
    output, other = layer(x), torch.cat([x[:1], 100 * some(2)])
    torch.testing.assert_close(layer(other)[0], output[0], **exact)
    torch.testing.assert_close(layer(x[1:2])[0], output[1], **exact)
    last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, output)
    assert output.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    again = LAYERS[name]().double().eval()
    again.load_state_dict(layer.state_dict())
    assert not any("edge" in key for key in layer.state_dict())
    for copied in (again, deepcopy(layer)):
        assert torch.equal(copied(x), output)
    layer.train()
    alone = torch.allclose(layer(other)[0], layer(x)[0], **exact)
    assert alone != has_batch_norm(layer)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_differences(name):
    """Of a random direction, in evaluation and, with a batch norm, in training."""
    layer, x = randomised(LAYERS[name]()), some(2, 2, 3)
    assert torch.autograd.gradcheck(layer, x, fast_mode=True)
    assert not has_batch_norm(layer) or torch.autograd.gradcheck(layer.train(), x, fast_mode=True)


COMPILED = ["danet's code", "add", "gated sum"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in COMPILED else pytest.mark.slow) for n in LAYERS],
)
def test_compiled(name):
    """In one graph, but for edges, which no layer over edges is."""
    torch._dynamo.reset()
    layer, x = randomised(LAYERS[name]()), some()
    fullgraph = "criss_cross" not in PATTERNS.get(name, {}).values()
    if not fullgraph and torch.compile(is_exporting, backend="eager")(x).any():
        pytest.skip("this torch (2.11) says that it exports while it compiles")
    output = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")(x)
    assert_same(output, layer(x), [x, *layer.parameters()], rtol=1e-7, atol=1e-7)


def is_exporting(x):
    return torch.zeros_like(x) + int(torch.compiler.is_exporting())


@pytest.mark.parametrize("name", [name for name in LAYERS if "danet" not in name])
def test_autocast(name):
    """Dot products of whole maps are too large for half precision to place: not DANet's."""
    layer, x = LAYERS[name](), some(dtype=torch.float32)
    if name not in ATTENTION:
        layer = randomised(layer).float()
    for module in layer.modules():
        if isinstance(gamma := getattr(module, "gamma", None), nn.Parameter):
            nn.init.constant_(gamma, 0.5)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        half = layer(x.bfloat16())
    assert half.shape == x.shape
    assert half.dtype == torch.bfloat16 or name not in ATTENTION
    assert output.dtype == torch.float32
    tolerance = 2e-2 if name in ATTENTION else 5e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    (gradient,), (exact,) = (torch.autograd.grad(y.sum(), x) for y in (output, expected))
    assert (gradient - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", ATTENTION)
def test_residual(name):
    x, begins = some(), LAYERS[name]().double()
    assert torch.equal(begins(x), x)
    found = torch.autograd.grad(begins(x).pow(3).sum(), [*begins.parameters()])
    for (key, _), gradient in zip(begins.named_parameters(), found, strict=True):
        assert (gradient != 0).any() == ("gamma" in key), key
    none, add = (randomised(LAYERS[name](residual=kind)) for kind in (None, "add"))
    add.load_state_dict(none.state_dict())
    if name != "axial":  # of two attentions, each with its residual
        torch.testing.assert_close(add(x), x + none(x))


@pytest.mark.parametrize("name", [*CHANNEL, "full"])
def test_dropout_of_the_weights_in_training_only(name):
    layer, plain = randomised(LAYERS[name](dropout_p=0.5)), LAYERS[name]().double()
    plain.load_state_dict(layer.state_dict())
    x = some()
    assert torch.equal(layer(x), plain(x))
    assert not torch.equal(layer.train()(x), layer(x))


# multiply-adds and parameters as the docstrings say: C channels, h hidden ones, N pixels
C, h, N = CHANNELS, 3, HEIGHT * WIDTH
OWN = {"inner_channels": 6, "value_channels": 10, "backend": "math"}  # which torch counts
COSTS = {
    "se": (GATES["se"], 2 * C * h, 2 * C * h + h + C),
    "sse": (GATES["sse"], C * N, C + 1),
    "eca": (GATES["eca"], 3 * C, 3),
    "cbam channel": (GATES["cbam channel"], 4 * C * h, 2 * C * h),
    "cbam spatial": (GATES["cbam spatial"], 2 * 49 * N, 2 * 49 + 2),
    "cbam spatial, paper's": (GATES["cbam spatial, paper's"], 2 * 49 * N, 2 * 49 + 1),
    "cbam": (GATES["cbam"], 4 * C * h + 98 * N, 2 * C * h + 98 + 2),
    "bam": (
        GATES["bam"],
        2 * C * h + (C * h + 18 * h**2 + h) * N,
        3 * C * h + 18 * h**2 + 5 * h + 2 * C + 2,
    ),
    "scse": (GATES["scse"], C * C + C * N, C * C + C // 2 + 2 * C + 1),
    "coordinate": (GATES["coordinate"], 2 * (HEIGHT + WIDTH) * C * 8, 3 * C * 8 + 3 * 8 + 2 * C),
    "gated sum": (lambda: Twice(GatedSum(C)), 2 * C**2 * N, 2 * C**2 + C),
    "danet": (lambda: ChannelAttention(C, backend="math"), 2 * N * C**2, 1),
    "xca": (
        lambda: CHANNEL["xca"](backend="math"),
        2 * N * C**2 // 3 + 4 * N * C**2,
        4 * C**2 + 3 + 4 * C + 1,
    ),
    "transposed": (
        lambda: CHANNEL["transposed"](backend="math"),
        5 * N * C**2 + 27 * N * C,
        4 * C**2 + 2 + 27 * C + 1,
    ),
    "context": (
        lambda: CONTEXT["add"](backend="math"),
        2 * N * C + 2 * C * h,
        C + 2 * C * h + 3 * h + C,
    ),
    "full": (
        lambda: SpatialAttention(C, **OWN),
        2 * N * C * (6 + 10) + N * N * (6 + 10),
        2 * (6 + 10) * C + 2 * 6 + 10 + C + 1,
    ),
    "full without biases": (
        lambda: SpatialAttention(C, bias=False, **OWN),
        2 * N * C * (6 + 10) + N * N * (6 + 10),
        2 * (6 + 10) * C + 1,
    ),
    "axial": (
        lambda: SpatialAttention(C, pattern="axial", **OWN),
        2 * 2 * N * C * (6 + 10) + N * (HEIGHT + WIDTH) * (6 + 10),
        2 * (2 * (6 + 10) * C + 2 * 6 + 10 + C + 1),
    ),
}


class Twice(nn.Module):
    """A mixture of a map with itself."""

    def __init__(self, mixture):
        super().__init__()
        self.mixture = mixture

    def forward(self, x):
        return self.mixture(x, x)


@pytest.mark.parametrize("name", COSTS)
def test_cost_is_as_documented(name):
    make, multiply_adds, parameters = COSTS[name]
    layer = make().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(some(1, dtype=torch.float32).detach())
    assert counter.get_total_flops() == 2 * multiply_adds
    assert sum(p.numel() for p in layer.parameters()) == parameters


AT_LEAST = "expected at least 1, got"
WRONG = [
    (lambda: SqueezeExcitation(0), f"channels: {AT_LEAST} 0"),
    (lambda: SqueezeExcitation(8, reduction=0), f"reduction: {AT_LEAST} 0"),
    (lambda: SCSE(8, reduction=-2), f"reduction: {AT_LEAST} -2"),
    (lambda: BAM(8, hidden_channels=0), f"hidden_channels: {AT_LEAST} 0"),
    (lambda: BAM(8, dilation=0), f"dilation: {AT_LEAST} 0"),
    (lambda: EfficientChannelAttention(8, kernel_size=4), "kernel_size: expected an odd.*got 4"),
    (lambda: EfficientChannelAttention(None), "kernel_size: expected a number if channels"),
    (lambda: CBAM(8, kernel_size=6), "kernel_size: expected an odd number, got 6"),
    (lambda: CBAM(8, order="parallel"), "order: expected 'channel_first' or.*got 'parallel'"),
    (lambda: SCSE(8, fusion="concat"), "fusion: expected 'sum', 'max' or 'prod.*got 'concat'"),
    (lambda: combined(mode="mean"), "mode: .*'product' or 'gated_sum', got 'mean'"),
    (lambda: combined(mode="gated_sum"), "channels: expected a number with mode='gated_sum'.*None"),
    (lambda: combined(mode="sum", channels=6), "channels: .* any other, got 6 with 'sum'"),
    (lambda: combined(mode="gated_sum", channels=0), f"channels: {AT_LEAST} 0"),
    (lambda: combined(names=("a", "a")), r"names: expected two that differ, got \('a', 'a'\)"),
    (lambda: ChannelAttention(0), f"channels: {AT_LEAST} 0"),
    (lambda: ChannelAttention(12, score="cosin"), "score: expected one of scaled_.*got 'cosin'"),
    (lambda: ChannelAttention(12, score="additive"), "score: 'additive' has a tensor"),
    (
        lambda: ChannelAttention(12, score=attnkit.Cosine(torch.ones(1))),
        "score: the tensor temperature of Cosine would not be a parameter",
    ),
    (lambda: ChannelAttention(12, residual="no"), "residual: expected 'gamma', 'add' or None"),
    (lambda: ChannelAttention(12, dropout_p=1.0), "dropout_p: expected 0 <= .* < 1, got 1.0"),
    (lambda: ChannelAttention(12, backend="flahs"), "backend: expected 'auto' or one of"),
    (lambda: CrossCovarianceAttention(12), "num_heads: 8 does not divide channels 12"),
    (lambda: CrossCovarianceAttention(12, num_heads=0), "num_heads: 0 does not divide channels"),
    (lambda: TransposedAttention(12, num_heads=5), "num_heads: 5 does not divide channels 12"),
    (lambda: ContextAttention(12, reduction=0), "reduction: .*and at least 2 channels left of 12"),
    (lambda: ContextAttention(12, reduction=7), "reduction: expected.*got 7"),
    (lambda: ContextAttention(12, fusion="multiply", reduction=2), "fusion: .* or 'scale', got"),
    (lambda: ContextAttention(12, backend="flahs", reduction=2), "backend: expected 'auto' or"),
    (lambda: SpatialAttention(0), f"channels: {AT_LEAST} 0"),
    (lambda: SpatialAttention(10, num_heads=3), "num_heads: 3 does not divide inner_channels 10"),
    (lambda: SpatialAttention(10, num_heads=0), f"num_heads: {AT_LEAST} 0"),
    (
        lambda: SpatialAttention(10, num_heads=2, value_channels=7),
        "num_heads: 2 does not divide value_channels 7",
    ),
    (lambda: SpatialAttention(10, inner_channels=0), f"inner_channels: {AT_LEAST} 0"),
    (lambda: SpatialAttention(10, pattern="rows"), "pattern: expected 'full', .*got 'rows'"),
    (lambda: SpatialAttention(10, radius=2), "radius: only .* 'window', got 2 with 'full'"),
    (lambda: SpatialAttention(10, pattern="window", radius=-1), "radius: expected at least 0, got"),
    (lambda: SpatialAttention(10, pool=0), f"pool: {AT_LEAST} 0"),
    (lambda: SpatialAttention(10, pattern="axial", pool=2), "pool: only .*got 2 with 'axial'"),
    (lambda: SpatialAttention(10, pool=2, pooling="sum"), "pooling: expected 'max', .*got 'sum'"),
    (lambda: SpatialAttention(10, pooling="max"), "pooling: only with a pool above 1, got 'max'"),
    (
        lambda: SpatialAttention(
            10, pattern="axial", score=attnkit.learned_scores.CosineScore(1, 10)
        ),
        "score: 'axial' has two attentions, which need a module each",
    ),
    (
        lambda: Combined(nn.Identity(), nn.Conv2d(6, 1, 1), mode="product")(torch.ones(2, 6, 5, 3)),
        r"got \[2, 6, 5, 3\] from first and \[2, 1, 5, 3\] from second",
    ),
    (lambda: BAM(8)(torch.ones(1, 8, 5, 5)), "Expected more than 1 value per channel"),
    (lambda: CBAM(8)(torch.ones(1, 8, 1, 1)), "Expected more than 1 value per channel"),
]


def combined(**options):
    return Combined(nn.Identity(), nn.Identity(), **options)


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "gated sum"])
@pytest.mark.parametrize("shape", [(12, 7, 5), (3, 11, 7, 5), (3, 12, 0, 5), (3, 12, 7, 5, 2)])
def test_maps_that_do_not_fit_are_named(name, shape):
    message = r"^(x|features): expected \[batch, 12, height, width\] .*one pixel, got"
    with pytest.raises(ValueError, match=message) as error:
        LAYERS[name]()(torch.zeros(shape))
    assert str(list(shape)) in str(error.value)
