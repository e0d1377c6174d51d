"""Gates with timm's and torchvision's weights: equal outputs and gradients, or a refusal."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import EcaModule, SEModule
from timm.layers.cbam import CbamModule, ChannelAttn, LightCbamModule, SpatialAttn
from timm.layers.coord_attn import CoordAttn
from torch import nn
from torchvision.ops import SqueezeExcitation as TorchvisionSE

from attnkit import interop
from attnkit.layers import (
    CBAM,
    CBAMChannelGate,
    CBAMSpatialGate,
    CoordinateAttention,
    EfficientChannelAttention,
    SqueezeExcitation,
)

CHANNELS = 23

TIMM = {
    "se": (lambda: SEModule(CHANNELS), SqueezeExcitation),
    "se, 5 hidden": (lambda: SEModule(CHANNELS, rd_channels=5), SqueezeExcitation),
    "se, no bias": (lambda: SEModule(CHANNELS, bias=False), SqueezeExcitation),
    "se, torch's sigmoid": (lambda: SEModule(CHANNELS, gate_layer=nn.Sigmoid), SqueezeExcitation),
    "eca": (lambda: EcaModule(CHANNELS), EfficientChannelAttention),
    "eca, 7 wide": (lambda: EcaModule(kernel_size=7), EfficientChannelAttention),
    "cbam": (lambda: CbamModule(CHANNELS, rd_ratio=1 / 4), CBAM),
    "cbam, biases": (lambda: CbamModule(CHANNELS, mlp_bias=True, spatial_kernel_size=3), CBAM),
    "cbam channel": (lambda: ChannelAttn(CHANNELS, rd_ratio=1 / 4), CBAMChannelGate),
    "cbam spatial": (lambda: SpatialAttn(5), CBAMSpatialGate),
    "coordinate": (lambda: CoordAttn(CHANNELS), CoordinateAttention),
    "coordinate, biases": (lambda: CoordAttn(CHANNELS, bias=True), CoordinateAttention),
}


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            nn.init.normal_(child.running_mean)
            nn.init.uniform_(child.running_var, 0.5, 2.0)
            child.eps, child.momentum = 1e-3, 0.3
    return module


def assert_equal(ours, theirs, dtype, height, width):
    """Outputs, gradients by the input and by each parameter, and the state afterwards."""
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    )
    x = torch.randn(3, CHANNELS, height, width, dtype=dtype, requires_grad=True)
    actual, expected = ours(x), theirs(x)
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, **tolerance)
    cotangent = torch.randn_like(expected) / expected[0].numel() ** 0.5
    for mine, their in zip(
        torch.autograd.grad(actual, [x, *ours.parameters()], cotangent),
        torch.autograd.grad(expected, [x, *theirs.parameters()], cotangent),
        strict=True,
    ):
        torch.testing.assert_close(mine, their, **tolerance)
    for mine, their in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, their, **tolerance)


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize(
    ("height", "width", "dtype"),
    [
        (1, 1, torch.float64),
        (7, 5, torch.float64),
        (12, 13, torch.float64),
        (7, 5, torch.float32),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_timm(name, height, width, dtype, training):
    make, kind = TIMM[name]
    theirs = randomised(make()).to(dtype).train(training)
    ours = interop.from_timm(theirs)
    assert type(ours) is kind
    assert ours.training == training
    assert_equal(ours, theirs, dtype, height, width)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchvision(height, width, dtype):
    theirs = randomised(TorchvisionSE(CHANNELS, 5)).to(dtype).eval()
    ours = interop.from_torchvision(theirs)
    assert type(ours) is SqueezeExcitation
    assert not ours.training
    assert_equal(ours, theirs, dtype, height, width)
    x = torch.randn(3, CHANNELS, height, width, dtype=dtype)
    torch.testing.assert_close(ours.gate(x), theirs._scale(x))


def test_weights_are_a_copy():
    theirs = randomised(SEModule(CHANNELS))
    ours = interop.from_timm(theirs)
    assert ours.reduce.weight.data_ptr() != theirs.fc1.weight.data_ptr()


@pytest.mark.parametrize(("name", "count"), [("seresnet33ts", 10), ("ecaresnet26t", 8)])
def test_every_gate_of_a_network_nobody_here_wrote(name, count):
    network = timm.create_model(name, num_classes=5)
    for parameter in network.parameters():
        if parameter.ndim == 1:  # norms that end a branch start at 0
            nn.init.uniform_(parameter, 0.5, 1.0)
    network = network.double().eval()
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = network(images)
    assert expected.std() > 0.01
    replaced = 0
    for parent in [*network.modules()]:
        for child_name, child in parent.named_children():
            if type(child) in (SEModule, EcaModule):
                setattr(parent, child_name, interop.from_timm(child))
                replaced += 1
    assert replaced == count
    torch.testing.assert_close(network(images), expected, rtol=1e-10, atol=1e-10)


def altered(module, change):
    change(module)
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SEModule(8, act_layer=nn.SiLU), "act is SiLU"),
        (lambda: SEModule(8, gate_layer="hard_sigmoid"), "gate is Hardsigmoid"),
        (lambda: SEModule(8, norm_layer=nn.BatchNorm2d), "bn is BatchNorm2d"),
        (lambda: SEModule(8, add_maxpool=True), "add_maxpool: pools the maxima too"),
        (lambda: altered(SEModule(8), lambda m: setattr(m, "act", nn.Conv2d(8, 8, 1))),
         "act is Conv2d"),
        (lambda: altered(SEModule(8), lambda m: m.gate.register_forward_hook(print)),
         "hooks at gate"),
        (lambda: altered(SEModule(8), lambda m: m.register_forward_hook(print)),
         "hooks at the module itself"),
        (lambda: altered(SEModule(8), lambda m: setattr(m, "extra", nn.Linear(2, 2))),
         "extra is Linear"),
        (lambda: EcaModule(8, use_mlp=True), "use_mlp: two layers"),
        (lambda: EcaModule(8, gate_layer="tanh"), "gate is Tanh"),
        (lambda: altered(EcaModule(8), lambda m: setattr(m.conv, "padding_mode", "circular")),
         "convolutions of another geometry"),
        (lambda: CbamModule(8, act_layer=nn.SiLU), "channel.act is SiLU"),
        (lambda: CbamModule(8, gate_layer="hard_sigmoid"), "channel.gate is Hardsi.*spatial.g"),
        (lambda: altered(CbamModule(8), lambda m: setattr(m.spatial.conv.conv, "dilation", (2, 2))),
         "convolutions of another geometry"),
        (lambda: altered(CbamModule(8), lambda m: setattr(m.spatial.conv.bn, "act", nn.ReLU())),
         "spatial.conv.bn.act is ReLU"),
        (lambda: CoordAttn(8, has_skip=True), "has_skip: adds the input"),
        (lambda: CoordAttn(8, norm_layer=None), "bn1 is Identity"),
        (lambda: CoordAttn(8, act_layer=nn.ReLU), "act is ReLU"),
        (lambda: CoordAttn(8, norm_layer=partial(nn.BatchNorm2d, affine=False)),
         r"norm.weight is missing in CoordAttn and \(8,\) here"),
    ],
)  # fmt: skip
def test_what_ours_lack_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        interop.from_timm(make())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: TorchvisionSE(8, 2, activation=nn.SiLU), "activation is SiLU"),
        (lambda: TorchvisionSE(8, 2, scale_activation=nn.Hardsigmoid),
         "scale_activation is Hardsigmoid"),
        (lambda: altered(TorchvisionSE(8, 2), lambda m: setattr(m.avgpool, "output_size", 2)),
         "pools to 2 and not to 1"),
    ],
)  # fmt: skip
def test_what_ours_lack_of_torchvisions_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        interop.from_torchvision(make())


@pytest.mark.parametrize("module", [LightCbamModule(8), timm.layers.EffectiveSEModule(8)])
def test_other_classes_are_refused(module):
    with pytest.raises(TypeError, match=r"expected timm.*SEModule, .* itself, got timm"):
        interop.from_timm(module)
