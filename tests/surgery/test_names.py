"""Every attention of feature maps by its name, and DANet's."""

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from attnkit import (
    ChannelAttention,
    DualAttention,
    ScaledDot,
    SpatialAttention,
    insert_attention,
)
from attnkit.surgery.insert import FEATURE_ATTENTION, make_feature_attention

CONF = Path(__file__).resolve().parents[2] / "conf" / "attention"


@pytest.mark.parametrize("name", FEATURE_ATTENTION)
def test_maps_keep_their_shape_and_every_parameter_learns(name):
    torch.manual_seed(0)
    options = {"reduction": 4} if name == "context" else {}
    module = make_feature_attention(name, 32, **options)
    for parameter in module.parameters():  # away from zero starts, behind which nothing learns
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 32, 7, 5, requires_grad=True)
    y = module(x)
    assert y.shape == x.shape
    torch.sin(3 * y).sum().backward()
    assert x.grad.abs().sum() > 0
    for key, parameter in module.named_parameters():
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", FEATURE_ATTENTION)
def test_the_command_line_has_the_same(name):
    node = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    attention = FEATURE_ATTENTION[name]
    attention = attention if isinstance(attention, partial) else partial(attention)
    assert node.pop("_target_") == f"attnkit.layers.{attention.func.__name__}"
    assert node.pop("_partial_") is True
    assert attention.keywords.items() <= node.items()
    make_feature_attention(name, 32, **node)


def test_the_command_line_has_no_other():
    assert {p.stem for p in CONF.glob("*.yaml")} == {*FEATURE_ATTENTION, "none"}


def test_dual_is_the_sum_of_both():
    torch.manual_seed(0)
    dual = DualAttention(8, reduction=2, score="scaled_dot").double()
    with torch.no_grad():
        dual.position.residual.gamma.fill_(0.7)
        dual.channel.residual.gamma.fill_(-0.3)
    x = torch.randn(2, 8, 3, 5).double()
    position = SpatialAttention(8, inner_channels=4, value_channels=8, residual=None).double()
    position.attention.load_state_dict(dual.position.attention.state_dict())
    channel = ChannelAttention(8, score=ScaledDot(), residual=None).double()
    torch.testing.assert_close(dual(x), 2 * x + 0.7 * position(x) - 0.3 * channel(x))
    assert torch.equal(DualAttention(8)(x.float()), 2 * x.float())  # γ begin at 0
    with pytest.raises(ValueError, match="reduction: expected at least 1, got 0"):
        DualAttention(8, reduction=0)


@pytest.mark.parametrize("name", FEATURE_ATTENTION)
def test_an_identity_start_can_be_left(name):
    """A γ of ours in front of a layer's own, zero too, would leave both without a gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    x = torch.randn(4, 3, 8, 8)
    before = net(x)
    options = {"reduction": 4} if name == "context" else {}
    insert_attention(net, name, start_as_identity=True, example=x, **options)
    net.eval()
    assert torch.equal(net(x), before)
    net.train()
    attention = net[0].attention
    start = {key: value.clone() for key, value in attention.named_parameters()}
    optimiser = torch.optim.SGD(attention.parameters(), lr=0.1)
    for _ in range(5):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        optimiser.step()
    still = {key for key, value in attention.named_parameters() if torch.equal(value, start[key])}
    assert not still


@pytest.mark.parametrize("name", ["spatial", "window", "channel", "xca", "danet", "context"])
def test_autocast_is_not_undone(name):
    module = make_feature_attention(name, 32, **({"reduction": 4} if name == "context" else {}))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(1, 32, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
