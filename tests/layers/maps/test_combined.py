"""Two feature-map modules made one: each mode is its formula, whatever the two are."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import attnkit
from attnkit import CBAM, SCSE, CBAMChannelGate, CBAMSpatialGate, Combined, SqueezeExcitation

BATCH, CHANNELS, HEIGHT, WIDTH = 2, 6, 5, 3


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def some(**options):
    return torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64, **options)


def two():
    """One that mixes channels and one that mixes pixels: their order matters."""
    return nn.Conv2d(CHANNELS, CHANNELS, 1), nn.AvgPool2d(3, 1, 1)


def gated(a, b, module):
    stacked = torch.cat([a, b], dim=1)
    weight, bias = module.fusion.mix.weight[:, :, 0, 0], module.fusion.mix.bias
    share = torch.sigmoid(torch.einsum("oc,bchw->bohw", weight, stacked) + bias[:, None, None])
    return share * a + (1 - share) * b


FORMULAS = {
    "sequence": lambda first, second, x, module: second(first(x)),
    "sum": lambda first, second, x, module: first(x) + second(x),
    "max": lambda first, second, x, module: torch.where(first(x) > second(x), first(x), second(x)),
    "product": lambda first, second, x, module: first(x) * second(x),
    "gated_sum": lambda first, second, x, module: gated(first(x), second(x), module),
}


def combined(mode, **options):
    channels = CHANNELS if mode == "gated_sum" else None
    return randomised(Combined(*two(), mode=mode, channels=channels, **options))


@pytest.mark.parametrize("mode", FORMULAS)
def test_mode_is_its_formula(mode):
    module, x = combined(mode), some(requires_grad=True)
    actual, expected = module(x), FORMULAS[mode](module.first, module.second, x, module)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(x)
    tensors = [x, *module.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(actual, tensors, cotangent),
        torch.autograd.grad(expected, tensors, cotangent),
        strict=True,
    ):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    others = [FORMULAS[m](module.first, module.second, x, module)
              for m in FORMULAS if m not in (mode, "gated_sum")]  # fmt: skip
    assert not any(torch.allclose(actual, other) for other in others)


@pytest.mark.parametrize("mode", FORMULAS)
def test_gradients_compiled_and_copied(mode):
    torch._dynamo.reset()
    module, x = combined(mode), some()
    small = x[:1, :, :2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(module, small)
    compiled = torch.compile(deepcopy(module), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    with torch.autocast("cpu", torch.bfloat16):
        close = module.float()(x.float())
    torch.testing.assert_close(close, module.double()(x), rtol=0.05, atol=0.05, check_dtype=False)


def test_a_gated_sum_starts_as_the_mean_and_learns():
    module, x = Combined(*two(), mode="gated_sum", channels=CHANNELS).double(), some()
    torch.testing.assert_close(module(x), (module.first(x) + module.second(x)) / 2)
    gradients = torch.autograd.grad(module(x).square().sum(), [*module.fusion.parameters()])
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)


def test_the_map_of_a_gated_sum_is_captured():
    module, x = combined("gated_sum"), some()
    with attnkit.capture_gates(module) as maps:
        output = module(x)
    share = maps["fusion"][0]
    assert share.shape == x.shape
    torch.testing.assert_close(output, share * module.first(x) + (1 - share) * module.second(x))


def test_cost_of_a_gated_sum_is_as_documented():
    module = combined("gated_sum").fusion
    with FlopCounterMode(display=False) as counter:
        module(some()[:1], some()[:1])
    assert counter.get_total_flops() == 2 * (2 * CHANNELS**2 * HEIGHT * WIDTH)
    assert sum(p.numel() for p in module.parameters()) == 2 * CHANNELS**2 + CHANNELS


def test_cbam_and_scse_are_instances():
    x = some()
    cbam = randomised(CBAM(CHANNELS))
    channel, spatial = CBAMChannelGate(CHANNELS), CBAMSpatialGate(CHANNELS)
    again = Combined(channel, spatial, names=("channel", "spatial")).double().eval()
    again.load_state_dict(cbam.state_dict())
    assert torch.equal(again(x), cbam(x))
    scse = randomised(SCSE(CHANNELS, fusion="max"))
    assert isinstance(scse, Combined)
    assert torch.equal(scse(x), torch.maximum(scse.channel(x), scse.spatial(x)))


class Residual(nn.Module):
    """An attention that adds its input, scaled, as DANet's two are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.scale * self.inner(x)


def test_as_danet_combines_and_nested():
    position, channel = Residual(nn.AvgPool2d(3, 1, 1)), Residual(SqueezeExcitation(CHANNELS))
    danet = Combined(position, channel, mode="sum", names=("position", "channel")).double()
    x = some()
    torch.testing.assert_close(danet(x), 2 * x)
    assert list(dict(danet.named_children())) == ["position", "channel"]
    randomised(danet)
    torch.testing.assert_close(danet(x), position(x) + channel(x))
    nested = Combined(danet, CBAM(CHANNELS), mode="max").double().eval()
    torch.testing.assert_close(nested(x), torch.maximum(danet(x), nested.second(x)))
    with attnkit.capture_gates(nested) as maps:
        nested(x)
    assert list(maps) == ["first.channel.inner", "second.channel", "second.spatial"]


def test_one_module_twice_shares_its_weights():
    module = nn.Conv2d(CHANNELS, CHANNELS, 1).double()
    both, x = Combined(module, module), some()
    assert len([*both.parameters()]) == 2
    torch.testing.assert_close(both(x), module(module(x)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "mean"},
            "mode: expected 'sequence', 'sum', 'max', 'product' or 'gated_sum', got 'mean'",
        ),
        ({"mode": "gated_sum"}, "channels: expected a number with mode='gated_sum'.*got None"),
        ({"mode": "sum", "channels": 6}, "channels: .* and None with any other, got 6 with 'sum'"),
        ({"mode": "gated_sum", "channels": 0}, "channels: expected at least 1, got 0"),
        ({"names": ("a", "a")}, r"names: expected two that differ, got \('a', 'a'\)"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Combined(*two(), **options)


def test_outputs_of_different_shapes_are_refused():
    module = Combined(nn.Identity(), nn.Conv2d(CHANNELS, 1, 1).double(), mode="product")
    with pytest.raises(
        ValueError, match=r"got \[2, 6, 5, 3\] from first and \[2, 1, 5, 3\] from second"
    ):
        module(some())
