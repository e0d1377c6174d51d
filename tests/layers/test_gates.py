"""Gates and combinations of two modules: the papers' formulas, and the maps that are captured.

Parity with timm and torchvision is in tests/test_interop_gates.py.
"""

from copy import deepcopy

import pytest
import timm
import torch
from layer_support import assert_same, randomised
from torch import nn
from torch.nn import functional as F

import attnkit
from attnkit import (
    BAM,
    CBAM,
    SCSE,
    CBAMChannelGate,
    CBAMSpatialGate,
    Combined,
    CoordinateAttention,
    EfficientChannelAttention,
    Gate,
    SpatialExcitation,
    SqueezeExcitation,
)

BATCH, CHANNELS, HEIGHT, WIDTH = 3, 13, 7, 5


def some(batch=BATCH, channels=CHANNELS, height=HEIGHT, width=WIDTH, dtype=torch.float64):
    return torch.randn(batch, channels, height, width, dtype=dtype, requires_grad=True)


def plain_norm(x, norm):
    """Batch normalization in evaluation."""
    mean, variance = norm.running_mean[:, None, None], norm.running_var[:, None, None]
    scaled = (x - mean) / (variance + norm.eps).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (12, 9)])
def test_bam_is_the_papers_formula(height, width):
    module, x = randomised(BAM(CHANNELS, reduction=4), 0.5), some(height=height, width=width)
    down, _, up, channel_norm = module.channel
    vector = x.mean((2, 3)) @ down.weight[:, :, 0, 0].T + down.bias
    vector = vector.relu() @ up.weight[:, :, 0, 0].T
    channel = plain_norm(vector[..., None, None], channel_norm)
    first, *dilated, last = (part for part in module.spatial if isinstance(part, nn.Conv2d))
    spatial = torch.einsum("oc,bchw->bohw", first.weight[:, :, 0, 0], x)
    spatial = (spatial + first.bias[:, None, None]).relu()
    for convolution in dilated:
        spatial = F.conv2d(F.pad(spatial, (4, 4, 4, 4)), convolution.weight, convolution.bias,
                           dilation=4).relu()  # fmt: skip
    spatial = torch.einsum("oc,bchw->bohw", last.weight[:, :, 0, 0], spatial)
    spatial = plain_norm(spatial, module.spatial[-1])
    expected = x + x * torch.sigmoid(channel + spatial)
    assert_same(module(x), expected, [x, *module.parameters()])


FUSIONS = {
    "sum": lambda channel, spatial: channel + spatial,
    "max": torch.max,
    "product": lambda channel, spatial: channel * spatial,
}


@pytest.mark.parametrize("fusion", FUSIONS)
def test_scse_is_the_papers_formula(fusion):
    module, x = randomised(SCSE(CHANNELS, fusion=fusion), 0.5), some()
    reduce, expand, squeeze = module.channel.reduce, module.channel.expand, module.spatial.squeeze
    assert len(reduce.weight) == CHANNELS // 2
    vector = (x.mean((2, 3)) @ reduce.weight[:, :, 0, 0].T + reduce.bias).relu()
    vector = torch.sigmoid(vector @ expand.weight[:, :, 0, 0].T + expand.bias)
    pixels = torch.sigmoid((x * squeeze.weight[0]).sum(1, keepdim=True) + squeeze.bias)
    expected = FUSIONS[fusion](x * vector[..., None, None], x * pixels)
    assert_same(module(x), expected, [x, *module.parameters()])


@pytest.mark.parametrize("bias", [True, False])
def test_cbam_is_the_papers_formula_in_both_orders(bias):
    x, options = some(), {"reduction": 4, "bias": bias, "kernel_size": 3, "batch_norm": False}
    first = randomised(CBAM(CHANNELS, **options), 0.5)
    second = CBAM(CHANNELS, **options, order="spatial_first").double()
    second.load_state_dict(first.state_dict())
    weights = {name: tensor[..., 0, 0] if tensor.ndim == 4 and tensor.shape[-1] == 1 else tensor
               for name, tensor in first.named_parameters()}  # fmt: skip

    def mlp(z):
        hidden = z @ weights["channel.mlp.0.weight"].T + weights.get("channel.mlp.0.bias", 0)
        up, bias = weights["channel.mlp.2.weight"], weights.get("channel.mlp.2.bias", 0)
        return hidden.relu() @ up.T + bias

    def channel(x):
        return x * (mlp(x.mean((2, 3))) + mlp(x.amax((2, 3)))).sigmoid()[..., None, None]

    def spatial(x):
        both = torch.stack([x.mean(1), x.amax(1)], dim=1)
        both = F.pad(both, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        gate = torch.einsum("bchwij,cij->bhw", both, weights["spatial.conv.weight"][0])
        return x * (gate + weights["spatial.conv.bias"]).sigmoid()[:, None]

    assert_same(first(x), spatial(channel(x)), [x, *first.parameters()])
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
        (SqueezeExcitation, 47, 2),
        (SqueezeExcitation, 3, 1),
        (CBAMChannelGate, 15, 1),
        (BAM, 33, 2),
        (CoordinateAttention, 512, 16),
        (CoordinateAttention, 64, 8),
    ],
)
def test_hidden_channels(make, channels, hidden):
    for options, expected in (({}, hidden), ({"reduction": 2, "hidden_channels": 5}, 5)):
        module = make(channels, **options)
        widths = [m.out_channels for m in module.modules() if isinstance(m, nn.Conv2d)]
        assert widths[0] == expected
        assert module(some(2, channels, 2, 3, torch.float32)).shape == (2, channels, 2, 3)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (SqueezeExcitation, (CHANNELS, 1, 1)),
        (SpatialExcitation, (1, HEIGHT, WIDTH)),
        (EfficientChannelAttention, (CHANNELS, 1, 1)),
        (CBAMChannelGate, (CHANNELS, 1, 1)),
        (CBAMSpatialGate, (1, HEIGHT, WIDTH)),
        (BAM, (CHANNELS, HEIGHT, WIDTH)),
        (CoordinateAttention, (CHANNELS, HEIGHT, WIDTH)),
    ],
)
def test_the_map_scales_the_features(make, shape):
    module, x = randomised(make(CHANNELS), 0.5), some()
    gate = module.gate(x)
    assert gate.shape == (BATCH, *shape)
    assert ((gate > 0) & (gate < 1)).all()
    assert gate.std() > 0.005
    torch.testing.assert_close(module(x), x * gate + (x if make is BAM else 0))


@pytest.mark.parametrize("make", [EfficientChannelAttention, CBAMSpatialGate])
def test_any_number_of_channels(make):
    module, exact = make(None, kernel_size=5).eval(), make(CHANNELS, kernel_size=5).eval()
    exact.load_state_dict(module.state_dict())
    x = some(dtype=torch.float32)
    assert torch.equal(module(x), exact(x))
    assert module(x[:, :2]).shape == (BATCH, 2, HEIGHT, WIDTH)


def two():
    """One that mixes channels and one that mixes pixels: their order matters."""
    return nn.Conv2d(CHANNELS, CHANNELS, 1), nn.AvgPool2d(3, 1, 1)


def gated(a, b, module):
    weight, bias = module.fusion.mix.weight[:, :, 0, 0], module.fusion.mix.bias
    mixed = torch.einsum("oc,bchw->bohw", weight, torch.cat([a, b], dim=1))
    share = torch.sigmoid(mixed + bias[:, None, None])
    return share * a + (1 - share) * b


FORMULAS = {
    "sequence": lambda first, second, x, module: second(first(x)),
    "sum": lambda first, second, x, module: first(x) + second(x),
    "max": lambda first, second, x, module: torch.where(first(x) > second(x), first(x), second(x)),
    "product": lambda first, second, x, module: first(x) * second(x),
    "gated_sum": lambda first, second, x, module: gated(first(x), second(x), module),
}


@pytest.mark.parametrize("mode", FORMULAS)
def test_a_mode_of_combination_is_its_formula(mode):
    channels, x = CHANNELS if mode == "gated_sum" else None, some()
    module = randomised(Combined(*two(), mode=mode, channels=channels))
    expected = FORMULAS[mode](module.first, module.second, x, module)
    assert_same(module(x), expected, [x, *module.parameters()])
    others = [FORMULAS[m](module.first, module.second, x, module)
              for m in FORMULAS if m not in (mode, "gated_sum")]  # fmt: skip
    assert not any(torch.allclose(expected, other) for other in others)


def test_a_gated_sum_starts_as_the_mean_learns_and_is_captured():
    module, x = Combined(*two(), mode="gated_sum", channels=CHANNELS).double(), some()
    torch.testing.assert_close(module(x), (module.first(x) + module.second(x)) / 2)
    gradients = torch.autograd.grad(module(x).square().sum(), [*module.fusion.parameters()])
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    randomised(module)
    with attnkit.capture_gates(module) as maps:
        output = module(x)
    share = maps["fusion"][0]
    assert share.shape == x.shape
    torch.testing.assert_close(output, share * module.first(x) + (1 - share) * module.second(x))


class Residual(nn.Module):
    """An attention that adds its input, scaled, as DANet's two are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.scale * self.inner(x)


def test_combinations_nest_and_share():
    x = some()
    position, channel = Residual(nn.AvgPool2d(3, 1, 1)), Residual(SqueezeExcitation(CHANNELS))
    danet = Combined(position, channel, mode="sum", names=("position", "channel")).double()
    torch.testing.assert_close(danet(x), 2 * x)
    assert list(dict(danet.named_children())) == ["position", "channel"]
    nested = randomised(Combined(danet, CBAM(CHANNELS), mode="max"))
    expected = torch.maximum(position(x) + channel(x), nested.second(x))
    with attnkit.capture_gates(nested) as maps:
        torch.testing.assert_close(nested(x), expected)
    assert list(maps) == ["first.channel.inner", "second.channel", "second.spatial"]
    module = nn.Conv2d(CHANNELS, CHANNELS, 1).double()
    both = Combined(module, module)
    assert len([*both.parameters()]) == 2
    torch.testing.assert_close(both(x), module(module(x)))


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
    network, x = randomised(Network(), 0.5), some()
    expected = network(x)
    with attnkit.capture_gates(network) as maps:
        output = network(x)
    assert torch.equal(output, expected)
    counts = {"stages.0.0": 2, "stages.1.channel": 1, "stages.1.spatial": 1}
    assert {name: len(found) for name, found in maps.items()} == counts
    torch.testing.assert_close(maps["stages.0.0"][0], network.stages[0][0].gate(x))
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
    with attnkit.capture_gates(compiled) as maps:
        torch.testing.assert_close(compiled(x), expected)
    assert list(maps) == ["stages.0.0", "stages.1.channel", "stages.1.spatial"]
    torch.testing.assert_close(compiled(x), expected)
    assert len(compilations) == 1


def test_gates_of_ones_own_are_captured_and_a_model_without_is_refused():
    class Brightest(Gate):
        def gate(self, x):
            return (x - x.amax((2, 3), keepdim=True)).exp()

    x, module = some(), nn.Sequential(nn.ReLU(), Brightest(None))
    with attnkit.capture_gates(module) as maps:
        pass
    assert maps == {}
    with attnkit.capture_gates(module) as maps:
        output = module(x)
    torch.testing.assert_close(output, x.relu() * maps["1"][0])
    model = timm.layers.SEModule(8)
    with (
        pytest.raises(ValueError, match="model: SEModule has no gates"),
        attnkit.capture_gates(model),
    ):
        pass
