"""Weights of timm's and torchvision's gates over feature maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from attnkit.interop.conversion import has_hooks, loaded, refuse, renamed, state_of
from attnkit.layers.cbam import CBAM, CBAMChannelGate, CBAMSpatialGate
from attnkit.layers.gates import CoordinateAttention, EfficientChannelAttention, SqueezeExcitation

Converters = dict[type, Callable[[Any], nn.Module]]

_CHANNEL_GATE = {"fc1.": "mlp.0.", "fc2.": "mlp.2."}
_SPATIAL_GATE = {"conv.conv.": "conv.", "conv.bn.": "norm."}


def gates_of_timm() -> Converters:
    """Return a converter for each class of timm to which a gate here is equal."""
    from timm.layers.cbam import CbamModule, ChannelAttn, SpatialAttn
    from timm.layers.coord_attn import CoordAttn
    from timm.layers.eca import EcaModule
    from timm.layers.squeeze_excite import SEModule

    return {
        SEModule: _from_se,
        EcaModule: _from_eca,
        CbamModule: _from_cbam,
        ChannelAttn: _from_channel_attn,
        SpatialAttn: _from_spatial_attn,
        CoordAttn: _from_coord_attn,
    }


def gates_of_torchvision() -> Converters:
    """Return a converter for each class of torchvision to which a gate here is equal."""
    from torchvision.ops import SqueezeExcitation as TheirSqueezeExcitation

    return {TheirSqueezeExcitation: _from_torchvisions_se}


def _from_se(module: Any) -> SqueezeExcitation:
    ours = SqueezeExcitation(
        module.fc1.in_channels,
        hidden_channels=module.fc1.out_channels,
        bias=module.fc1.bias is not None,
    )
    names = {"fc1.": "reduce.", "fc2.": "expand."}
    refused = {"add_maxpool: pools the maxima too": module.add_maxpool}
    return _carried(ours, module, names, {"act": nn.ReLU, "bn": nn.Identity}, refused)


def _from_torchvisions_se(module: Any) -> SqueezeExcitation:
    ours = SqueezeExcitation(
        module.fc1.in_channels,
        hidden_channels=module.fc1.out_channels,
        bias=module.fc1.bias is not None,
    )
    names = {"fc1.": "reduce.", "fc2.": "expand."}
    parts = {
        "avgpool": nn.AdaptiveAvgPool2d,
        "activation": nn.ReLU,
        "scale_activation": nn.Sigmoid,
    }
    size = module.avgpool.output_size
    refused = {f"pools to {size} and not to 1": size not in (1, (1, 1))}
    return _carried(ours, module, names, parts, refused)


def _from_eca(module: Any) -> EfficientChannelAttention:
    # timm's convolves the mean over pixels of any number of channels, and does not keep the number
    ours = EfficientChannelAttention(None, kernel_size=module.conv.kernel_size[0])
    refused = {"use_mlp: two layers": module.conv2 is not None}
    return _carried(ours, module, {}, {}, refused)


def _from_channel_attn(module: Any) -> CBAMChannelGate:
    ours = CBAMChannelGate(
        module.fc1.in_channels,
        hidden_channels=module.fc1.out_channels,
        bias=module.fc1.bias is not None,
    )
    return _carried(ours, module, _CHANNEL_GATE, {"act": nn.ReLU})


def _from_spatial_attn(module: Any) -> CBAMSpatialGate:
    ours = CBAMSpatialGate(kernel_size=module.conv.conv.kernel_size[0])
    return _carried(ours, module, _SPATIAL_GATE, _conv_norm("conv."))


def _from_cbam(module: Any) -> CBAM:
    from timm.layers.cbam import ChannelAttn, SpatialAttn

    fc1, spatial = module.channel.fc1, module.spatial.conv.conv
    ours = CBAM(
        fc1.in_channels,
        hidden_channels=fc1.out_channels,
        bias=fc1.bias is not None,
        kernel_size=spatial.kernel_size[0],
    )
    names = {"channel.fc1.": "channel.mlp.0.", "channel.fc2.": "channel.mlp.2."}
    names |= {f"spatial.{theirs}": f"spatial.{mine}" for theirs, mine in _SPATIAL_GATE.items()}
    parts = {"channel": ChannelAttn, "spatial": SpatialAttn, "channel.act": nn.ReLU}
    return _carried(ours, module, names, parts | _conv_norm("spatial.conv."))


def _conv_norm(prefix: str) -> dict[str, type]:
    """Return the parts of timm's convolution with a norm and without an activation."""
    from timm.layers import BatchNormAct2d, ConvNormAct

    return {
        prefix.removesuffix("."): ConvNormAct,
        f"{prefix}bn": BatchNormAct2d,
        f"{prefix}bn.drop": nn.Identity,
        f"{prefix}bn.act": nn.Identity,
    }


def _from_coord_attn(module: Any) -> CoordinateAttention:
    ours = CoordinateAttention(
        module.conv1.in_channels,
        hidden_channels=module.conv1.out_channels,
        bias=module.conv1.bias is not None,
    )
    names = {"conv1.": "reduce.", "bn1.": "norm.", "conv_h.": "expand_rows."}
    names |= {"conv_w.": "expand_columns."}
    parts = {"bn1": nn.BatchNorm2d, "act": nn.Hardswish}
    refused = {"has_skip: adds the input": module.has_skip}
    return _carried(ours, module, names, parts, refused)


def _carried(
    ours: Any,
    theirs: nn.Module,
    names: Mapping[str, str],
    parts: Mapping[str, type],
    refused: Mapping[str, bool] | None = None,
) -> Any:
    """Return our module with the weights of theirs, whose parts except convolutions are as given.

    Convolutions must equal ours in all but their weights; settings of batch norms are copied.
    """
    from timm.layers.activations import Sigmoid

    reasons = dict(refused or {})
    convolutions, norms = [], []
    for name, module in theirs.named_modules():
        expected: tuple[type, ...] = (parts[name],) if name in parts else (nn.Conv1d, nn.Conv2d)
        if name.rpartition(".")[2] == "gate":
            expected = (nn.Sigmoid, Sigmoid)
        if name and type(module) not in expected:
            reasons[f"{name} is {type(module).__name__}"] = True
        elif has_hooks(module):
            reasons[f"hooks at {name or 'the module itself'}"] = True
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            convolutions.append(module)
        elif isinstance(module, nn.BatchNorm2d):
            norms.append(module)
    our_convolutions = [m for m in ours.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)]
    reasons["convolutions of another geometry"] = [*map(_geometry, convolutions)] != [
        *map(_geometry, our_convolutions)
    ]
    refuse(theirs, reasons)
    loaded(ours, renamed(state_of(theirs), names), theirs)
    our_norms = (module for module in ours.modules() if isinstance(module, nn.BatchNorm2d))
    for mine, their in zip(our_norms, norms, strict=True):
        mine.eps, mine.momentum = their.eps, their.momentum
        mine.train(their.training)  # it alone may be in evaluation, with frozen statistics
    return ours


def _geometry(module: Any) -> tuple[object, ...]:
    return (
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.padding_mode,
    )
