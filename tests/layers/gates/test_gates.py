"""Gates: the papers' formulas, any size, what a gate may see, and the maps that are captured.

Parity with timm and torchvision is in tests/test_interop_gates.py.
"""

from copy import deepcopy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import (
    BAM,
    CBAM,
    SCSE,
    CBAMChannelGate,
    CBAMSpatialGate,
    CoordinateAttention,
    EfficientChannelAttention,
    Gate,
    SpatialExcitation,
    SqueezeExcitation,
)

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 13, 7, 5

GATES = {
    "se": lambda: SqueezeExcitation(CHANNELS, reduction=4),
    "sse": lambda: SpatialExcitation(CHANNELS),
    "eca": lambda: EfficientChannelAttention(CHANNELS),
    "cbam channel": lambda: CBAMChannelGate(CHANNELS, reduction=4),
    "cbam spatial": lambda: CBAMSpatialGate(CHANNELS),
    "cbam spatial, paper's": lambda: CBAMSpatialGate(CHANNELS, batch_norm=False),
    "bam": lambda: BAM(CHANNELS, reduction=4, dilation=2),
    "coordinate": lambda: CoordinateAttention(CHANNELS),
}
COMBINED = {
    "cbam": lambda: CBAM(CHANNELS, reduction=4),
    "cbam, spatial first": lambda: CBAM(CHANNELS, reduction=4, order="spatial_first"),
    "scse": lambda: SCSE(CHANNELS),
    "scse, max": lambda: SCSE(CHANNELS, fusion="max"),
}
ALL = GATES | COMBINED
MAP_SHAPES = {
    "se": (CHANNELS, 1, 1),
    "sse": (1, HEIGHT, WIDTH),
    "eca": (CHANNELS, 1, 1),
    "cbam channel": (CHANNELS, 1, 1),
    "cbam spatial": (1, HEIGHT, WIDTH),
    "cbam spatial, paper's": (1, HEIGHT, WIDTH),
    "bam": (CHANNELS, HEIGHT, WIDTH),
    "coordinate": (CHANNELS, HEIGHT, WIDTH),
}


def randomised(module, dtype=torch.float64):
    """Random weights, and running statistics that are not those of a new norm."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 2.0)
            assert "running" in name
    return module.to(dtype).eval()


def some(batch=BATCH, channels=CHANNELS, height=HEIGHT, width=WIDTH, dtype=torch.float64):
    return torch.randn(batch, channels, height, width, dtype=dtype)


def has_batch_norm(module):
    return any(isinstance(child, nn.BatchNorm2d) for child in module.modules())


def plain_norm(x, norm):
    """Batch normalization in evaluation."""
    mean, variance = norm.running_mean[:, None, None], norm.running_var[:, None, None]
    scaled = (x - mean) / (variance + norm.eps).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def assert_equal_with_gradients(actual, expected, tensors):
    assert expected.std() > 0.05
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, tensors, cotangent),
        torch.autograd.grad(expected, tensors, cotangent),
        strict=True,
    ):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 5), (12, 9)])
def test_bam_is_the_papers_formula(height, width):
    module, x = randomised(BAM(CHANNELS, reduction=4)), some(height=height, width=width)
    x.requires_grad_()
    down, _, up, channel_norm = module.channel
    vector = x.mean((2, 3)) @ down.weight[:, :, 0, 0].T + down.bias
    vector = vector.relu() @ up.weight[:, :, 0, 0].T
    channel = plain_norm(vector[..., None, None], channel_norm)
    convolutions = [part for part in module.spatial if isinstance(part, nn.Conv2d)]
    first, *dilated, last = convolutions
    spatial = torch.einsum("oc,bchw->bohw", first.weight[:, :, 0, 0], x)
    spatial = (spatial + first.bias[:, None, None]).relu()
    for convolution in dilated:
        spatial = F.conv2d(F.pad(spatial, (4, 4, 4, 4)), convolution.weight, convolution.bias,
                           dilation=4).relu()  # fmt: skip
    spatial = torch.einsum("oc,bchw->bohw", last.weight[:, :, 0, 0], spatial)
    spatial = plain_norm(spatial, module.spatial[-1])
    expected = x + x * torch.sigmoid(channel + spatial)
    assert_equal_with_gradients(module(x), expected, [x, *module.parameters()])


FUSIONS = {
    "sum": lambda channel, spatial: channel + spatial,
    "max": torch.max,
    "product": lambda channel, spatial: channel * spatial,
}


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 5)])
def test_scse_is_the_papers_formula(fusion, height, width):
    module = randomised(SCSE(CHANNELS, fusion=fusion))
    x = some(height=height, width=width).requires_grad_()
    reduce, expand, squeeze = module.channel.reduce, module.channel.expand, module.spatial.squeeze
    assert len(reduce.weight) == CHANNELS // 2
    vector = (x.mean((2, 3)) @ reduce.weight[:, :, 0, 0].T + reduce.bias).relu()
    vector = torch.sigmoid(vector @ expand.weight[:, :, 0, 0].T + expand.bias)
    pixels = torch.sigmoid((x * squeeze.weight[0]).sum(1, keepdim=True) + squeeze.bias)
    expected = FUSIONS[fusion](x * vector[..., None, None], x * pixels)
    assert_equal_with_gradients(module(x), expected, [x, *module.parameters()])


@pytest.mark.parametrize("bias", [True, False])
def test_cbam_is_the_papers_formula_in_both_orders(bias):
    x = some().requires_grad_()
    options = {"reduction": 4, "bias": bias, "kernel_size": 3, "batch_norm": False}
    first = randomised(CBAM(CHANNELS, **options))
    second = CBAM(CHANNELS, **options, order="spatial_first").double()
    second.load_state_dict(first.state_dict())
    weights = {name: tensor[..., 0, 0] if tensor.ndim == 4 and tensor.shape[-1] == 1 else tensor
               for name, tensor in first.named_parameters()}  # fmt: skip

    def mlp(z):
        hidden = (
            z @ weights["channel.mlp.0.weight"].T + weights.get("channel.mlp.0.bias", 0)
        ).relu()
        return hidden @ weights["channel.mlp.2.weight"].T + weights.get("channel.mlp.2.bias", 0)

    def channel(x):
        return x * (mlp(x.mean((2, 3))) + mlp(x.amax((2, 3)))).sigmoid()[..., None, None]

    def spatial(x):
        both = torch.stack([x.mean(1), x.amax(1)], dim=1)
        both = F.pad(both, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        gate = torch.einsum("bchwij,cij->bhw", both, weights["spatial.conv.weight"][0])
        return x * (gate + weights["spatial.conv.bias"]).sigmoid()[:, None]

    tensors = [x, *first.parameters()]
    assert_equal_with_gradients(first(x), spatial(channel(x)), tensors)
    torch.testing.assert_close(second(x), channel(spatial(x)))
    assert not torch.allclose(first(x), second(x))


def test_the_width_of_eca_is_timms():
    for channels in [*range(1, 40), 64, 128, 256, 500, 512, 1024, 2048, 4096]:
        ours, theirs = EfficientChannelAttention(channels), timm.layers.EcaModule(channels)
        assert ours.conv.kernel_size == theirs.conv.kernel_size, channels
    assert EfficientChannelAttention(8, kernel_size=7).conv.kernel_size == (7,)
    assert EfficientChannelAttention(8, kernel_size=1).conv.kernel_size == (1,)


@pytest.mark.parametrize(
    ("make", "channels", "hidden"),
    [
        (SqueezeExcitation, 64, 4),
        (SqueezeExcitation, 47, 2),
        (SqueezeExcitation, 3, 1),
        (CBAMChannelGate, 15, 1),
        (BAM, 33, 2),
        (CoordinateAttention, 512, 16),
        (CoordinateAttention, 64, 8),
        (CoordinateAttention, 3, 8),
    ],
)
def test_hidden_channels(make, channels, hidden):
    widths = [m.out_channels for m in make(channels).modules() if isinstance(m, nn.Conv2d)]
    assert widths[0] == hidden
    module = make(channels, reduction=2, hidden_channels=5)
    widths = [m.out_channels for m in module.modules() if isinstance(m, nn.Conv2d)]
    assert widths[0] == 5
    assert module(some(2, channels, 2, 3, torch.float32)).shape == (2, channels, 2, 3)


@pytest.mark.parametrize("name", GATES)
def test_the_map_scales_the_features(name):
    module, x = randomised(GATES[name]()), some()
    gate = module.gate(x)
    assert gate.shape == (BATCH, *MAP_SHAPES[name])
    assert ((gate > 0) & (gate < 1)).all()
    assert gate.std() > 0.005
    torch.testing.assert_close(module(x), x * gate + (x if name == "bam" else 0))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 8), (5, 1), (2, 3), (17, 16)])
def test_any_size(name, height, width):
    module = randomised(ALL[name]())
    for training in (False, True):
        output = module.train(training)(some(height=height, width=width))
        assert output.shape == (BATCH, CHANNELS, height, width)
        assert output.isfinite().all()
    assert module.eval()(some(0, height=height, width=width)).shape == (0, CHANNELS, height, width)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("training", [False, True])
def test_gradients(name, training):
    module = randomised(ALL[name]()).train(training)
    x = some(2, height=2, width=3).requires_grad_()
    assert torch.autograd.gradcheck(module, x)
    gradients = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", ALL)
def test_items_see_each_other_only_through_batch_norm_in_training(name):
    module, x = randomised(ALL[name]()), some()
    other = torch.cat([x[:1], 3 * some(2) + 1])
    torch.testing.assert_close(module(other)[0], module(x)[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(x[1:2])[0], module(x)[1], rtol=1e-12, atol=1e-12)
    module.train()
    alone = torch.allclose(module(other)[0], module(x)[0], rtol=1e-12, atol=1e-12)
    assert alone != has_batch_norm(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("training", [False, True])
def test_compiled(name, training):
    torch._dynamo.reset()
    module, x = randomised(ALL[name]()).train(training), some()
    compiled = torch.compile(deepcopy(module), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("name", ALL)
def test_autocast_and_memory_format(name):
    module, x = randomised(ALL[name](), torch.float32), some(dtype=torch.float32)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x), expected, rtol=0.05, atol=0.05)
        assert module(x.bfloat16()).shape == x.shape
    last = module(x.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, expected)
    copied = deepcopy(module)
    assert torch.equal(copied(x), expected)
    again = ALL[name]().eval()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), expected)


# C channels, h hidden ones, S pixels: multiply-adds and parameters as the docstrings say
COSTS = {
    "se": (lambda C, h, S: 2 * C * h, lambda C, h: 2 * C * h + h + C),
    "sse": (lambda C, h, S: C * S, lambda C, h: C + 1),
    "eca": (lambda C, h, S: 3 * C, lambda C, h: 3),
    "cbam channel": (lambda C, h, S: 4 * C * h, lambda C, h: 2 * C * h),
    "cbam spatial": (lambda C, h, S: 2 * 49 * S, lambda C, h: 2 * 49 + 2),
    "cbam spatial, paper's": (lambda C, h, S: 2 * 49 * S, lambda C, h: 2 * 49 + 1),
    "cbam": (lambda C, h, S: 4 * C * h + 98 * S, lambda C, h: 2 * C * h + 98 + 2),
    "bam": (
        lambda C, h, S: 2 * C * h + (C * h + 18 * h**2 + h) * S,
        lambda C, h: 3 * C * h + 18 * h**2 + 5 * h + 2 * C + 2,
    ),
    "scse": (lambda C, h, S: 2 * C * h + C * S, lambda C, h: 2 * C * h + h + 2 * C + 1),
    "coordinate": (
        lambda C, h, S: 2 * (HEIGHT + WIDTH) * C * h,
        lambda C, h: 3 * C * h + 3 * h + 2 * C,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost_is_as_documented(name):
    module = ALL[name]().eval()
    hidden = {"scse": CHANNELS // 2, "coordinate": 8}.get(name, CHANNELS // 4)
    multiply_adds, parameters = COSTS[name]
    with FlopCounterMode(display=False) as counter:
        module(some(1, dtype=torch.float32))
    assert counter.get_total_flops() == 2 * multiply_adds(CHANNELS, hidden, HEIGHT * WIDTH)
    assert sum(p.numel() for p in module.parameters()) == parameters(CHANNELS, hidden)


@pytest.mark.parametrize("make", [EfficientChannelAttention, CBAMSpatialGate])
def test_any_number_of_channels(make):
    module = make(None, kernel_size=5).eval()
    exact = make(CHANNELS, kernel_size=5).eval()
    exact.load_state_dict(module.state_dict())
    x = some(dtype=torch.float32)
    assert torch.equal(module(x), exact(x))
    assert module(x[:, :2]).shape == (BATCH, 2, HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SqueezeExcitation(0), "channels: expected at least 1, got 0"),
        (lambda: SqueezeExcitation(8, reduction=0), "reduction: expected at least 1, got 0"),
        (lambda: SCSE(8, reduction=-2), "reduction: expected at least 1, got -2"),
        (lambda: BAM(8, hidden_channels=0), "hidden_channels: expected at least 1, got 0"),
        (lambda: BAM(8, dilation=0), "dilation: expected at least 1, got 0"),
        (
            lambda: EfficientChannelAttention(8, kernel_size=4),
            "kernel_size: expected an odd.*got 4",
        ),
        (lambda: EfficientChannelAttention(None), "kernel_size: expected a number if channels"),
        (lambda: CBAM(8, kernel_size=6), "kernel_size: expected an odd number, got 6"),
        (lambda: CBAM(8, order="parallel"), "order: expected 'channel_first' or.*got 'parallel'"),
        (
            lambda: SCSE(8, fusion="concat"),
            "fusion: expected 'sum', 'max' or 'prod.*got 'concat'",
        ),
    ],
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(13, 7, 5), (3, 12, 7, 5), (3, 13, 0, 5), (3, 13, 7, 5, 2)])
def test_maps_that_do_not_fit_are_named(name, shape):
    with pytest.raises(ValueError, match=r"x: expected \[batch, 13, height, width\].*got") as error:
        ALL[name]()(torch.zeros(shape))
    assert str(list(shape)) in str(error.value)


def test_one_value_is_too_few_for_a_batch_norm_in_training():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        BAM(CHANNELS)(some(1, dtype=torch.float32))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        CBAM(CHANNELS)(some(1, height=1, width=1, dtype=torch.float32))


class Network(nn.Module):
    """Two gates in containers, one of them called twice, beside another's gate."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.Sequential(SqueezeExcitation(CHANNELS), nn.ReLU()), CBAM(CHANNELS)]
        )
        self.timms = timm.layers.SEModule(CHANNELS)
        self.fails = False

    def forward(self, x):
        x = self.stages[1](self.timms(self.stages[0](x)))
        if self.fails:
            raise RuntimeError("as asked")
        return self.stages[0](x)


def test_captured_maps_are_those_that_scaled():
    network, x = randomised(Network()), some().requires_grad_()
    expected = network(x)
    with attnkit.capture_gates(network) as maps:
        output = network(x)
    assert torch.equal(output, expected)
    assert {name: len(found) for name, found in maps.items()} == {
        "stages.0.0": 2,
        "stages.1.channel": 1,
        "stages.1.spatial": 1,
    }
    first = network.stages[0][0]
    torch.testing.assert_close(maps["stages.0.0"][0], first.gate(x))
    assert not torch.equal(maps["stages.0.0"][0], maps["stages.0.0"][1])
    assert all(not gate.requires_grad for found in maps.values() for gate in found)
    with attnkit.capture_gates(network.stages[1]) as again:
        after = network.stages[1](x)
    torch.testing.assert_close(after, x * again["channel"][0] * again["spatial"][0])
    network(x)
    assert len(maps["stages.0.0"]) == 2


def test_capture_leaves_nothing_behind():
    network, x = randomised(Network()).train(), some()
    plain = deepcopy(network)
    with attnkit.capture_gates(network):
        network(x)
    plain(x)
    for name, tensor in plain.state_dict().items():  # running statistics moved once
        assert torch.equal(network.state_dict()[name], tensor), name
    network.fails = True
    with pytest.raises(RuntimeError, match="as asked"), attnkit.capture_gates(network) as maps:
        network(x)
    assert maps == {}
    for module in network.modules():
        assert not module._forward_hooks
        assert not isinstance(module, Gate) or "gate" not in vars(module)


def test_captures_nest():
    module, x = randomised(SqueezeExcitation(CHANNELS)), some()
    with attnkit.capture_gates(module) as outer:
        module(x)
        with attnkit.capture_gates(module) as inner:
            module(x)
        module(x)
    assert (len(outer[""]), len(inner[""])) == (3, 1)
    assert "gate" not in vars(module)


def test_capture_of_a_compiled_module_compiles_nothing():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    network, x = randomised(Network()), some()
    compiled = torch.compile(network, backend=backend)
    expected = compiled(x)
    before = len(compilations)
    with attnkit.capture_gates(compiled) as maps:
        torch.testing.assert_close(compiled(x), expected)
    assert list(maps) == ["stages.0.0", "stages.1.channel", "stages.1.spatial"]
    torch.testing.assert_close(compiled(x), expected)
    assert before == len(compilations) == 1


def test_gates_of_ones_own_are_captured():
    class Brightest(Gate):
        def gate(self, x):
            return (x - x.amax((2, 3), keepdim=True)).exp()

    x = some()
    with attnkit.capture_gates(nn.Sequential(nn.ReLU(), Brightest(None))) as maps:
        pass
    assert maps == {}
    module = nn.Sequential(Brightest(None))
    with attnkit.capture_gates(module) as maps:
        output = module(x)
    torch.testing.assert_close(output, x * maps["0"][0])


def test_a_model_without_gates_is_refused():
    with (
        pytest.raises(ValueError, match="model: SEModule has no gates"),
        attnkit.capture_gates(timm.layers.SEModule(8)),
    ):
        pass
