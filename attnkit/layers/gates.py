"""Gates, which scale a feature map by a map computed from it, and the capture of their maps."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least, choice, odd
from attnkit.core.contexts import Opened, shared, uncompiled
from attnkit.core.running import RunningModules, module_name
from attnkit.layers.maps import Combined, check_features


class Gate(nn.Module):
    """A module that scales every value of a feature map by a number between 0 and 1.

        y = x ⊙ gate(x)

    Feature maps `[batch, channels, height, width]` of any size in and out; a gate of your own is a
    subclass that defines `gate`. Items of a batch do not see each other, except in gates that
    document a batch normalization, and there in training only.

    The map of an untrained gate is about ½ everywhere (¼ for `CoordinateAttention`). A gate that is
    inserted into a trained network therefore weakens its features at first.

    Args:
        channels: channels of the map; None: any number, for gates whose parameters do not depend on
            it.

    Raises:
        ValueError: sizes that are not positive, a kernel size that is not odd, an unknown choice; a
            map of another shape or without pixels.
    """

    def __init__(self, channels: int | None) -> None:
        super().__init__()
        at_least(1, channels=channels)
        self.channels = channels

    def gate(self, x: Tensor) -> Tensor:
        """Return the map that scales x, in (0, 1): `[batch, 1 or channels, 1 or height, 1 or
        width]`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self.channels, "x")
        return x * self.gate(x)


def hidden_width(channels: int, reduction: int, hidden_channels: int | None, least: int = 1) -> int:
    """Return `hidden_channels` if given, else channels // reduction, but at least `least`."""
    at_least(1, reduction=reduction, hidden_channels=hidden_channels)
    return hidden_channels or max(least, channels // reduction)


@contextmanager
def capture_gates(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the gate maps of a model while it runs.

        with attnkit.capture_gates(cbam) as maps:
            cbam(features)
        maps["channel"][0]    # [batch, channels, 1, 1]
        maps["spatial"][0]    # [batch, 1, height, width]

    The maps of each gate are stored, detached, under its name in `named_modules()`, in the order of
    its calls. They are the very maps that scaled the features. Nothing is computed twice, so the
    running statistics of batch norms change as they do without the capture. Compiled modules run
    uncompiled inside the block. Other threads are captured too if they run in this context, as
    those of `asyncio.to_thread` do.

    Args:
        model: any module that contains gates of attnkit, or other modules with a method `gate` that
            `forward` calls and that returns the map.

    Raises:
        ValueError: the model has no gate.
    """
    # looked up in the class: in other networks an attribute `gate` often is a child module
    gates = {
        module_name(name): module
        for name, module in model.named_modules()
        if callable(getattr(type(module), "gate", None))
    }
    if not gates:
        raise ValueError(f"model: {type(model).__name__} has no gates")
    captured: dict[str, list[Tensor]] = {}
    names = {module: name for name, module in gates.items()}
    running = RunningModules(model)

    def note(module: nn.Module, map_: Tensor) -> None:
        if module in names:
            running.keep(captured, names[module], map_)

    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(running.followed())
        stack.enter_context(_CAPTURES.opened(note))
        for module in gates.values():
            stack.enter_context(shared(("gate", module), partial(_reporting, module)))
        yield captured


_CAPTURES: Opened[Callable[[nn.Module, Tensor], None]] = Opened("captures of gates")


def _reporting(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which `module.gate` passes its map to every open capture."""
    gate = getattr(module, "gate")  # noqa: B009  mypy takes module.gate for a child

    def reporting_gate(*args: object, **kwargs: object) -> Tensor:
        map_ = gate(*args, **kwargs)
        for note in _CAPTURES.get():
            note(module, map_.detach())
        return map_

    return patch.object(module, "gate", reporting_gate)


class SqueezeExcitation(Gate):
    """Squeeze-and-excitation: a gate for each channel, from the means of all channels.

        y = x ⊙ s,   s = σ(W₂ relu(W₁ z + b₁) + b₂),   z = mean of x over the pixels

    Feature maps `[batch, channels, height, width]` in and out, gate map `[batch, channels, 1, 1]`.
    W₁ and W₂ are 1 × 1 convolutions, which on one pixel are linear layers.

    Hu et al. 2018 (Squeeze-and-Excitation Networks); their formula has no biases, their code has
    them. Equal to torchvision's `ops.SqueezeExcitation` and to timm's `SEModule` with their default
    activations and the same number of hidden channels: timm's default rounds it to a multiple of 8,
    at least 8.

    Cost of an item, h the hidden channels: 2·channels·h multiply-adds, beside pooling and scaling;
    2·channels·h + h + channels parameters.

    Args:
        channels: channels of the map.
        reduction: divisor of `channels` that gives the hidden channels, rounded down, at least 1.
        hidden_channels: number of hidden channels; None: as `reduction` gives it.
        bias: whether W₁ and W₂ add a bias.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        hidden_channels: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(channels)
        hidden = hidden_width(channels, reduction, hidden_channels)
        self.reduce = nn.Conv2d(channels, hidden, 1, bias=bias)
        self.expand = nn.Conv2d(hidden, channels, 1, bias=bias)

    def gate(self, x: Tensor) -> Tensor:
        return self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class SpatialExcitation(Gate):
    """sSE, channel squeeze and spatial excitation: a gate for each pixel, from its channels.

        y = x ⊙ σ(w · x + b)

    Feature maps `[batch, channels, height, width]` in and out, gate map
    `[batch, 1, height, width]`. Roy et al. 2018 (Concurrent Spatial and Channel Squeeze &
    Excitation); their formula has no bias, their code has one.

    Cost of an item: channels·height·width multiply-adds, beside the scaling; channels + 1
    parameters.

    Args:
        channels: channels of the map.
        bias: whether the bias b is added.
    """

    def __init__(self, channels: int, *, bias: bool = True) -> None:
        super().__init__(channels)
        self.squeeze = nn.Conv2d(channels, 1, 1, bias=bias)

    def gate(self, x: Tensor) -> Tensor:
        return self.squeeze(x).sigmoid()


class SCSE(Combined):
    """scSE, concurrent squeeze-and-excitation by channel and by pixel.

        y = cSE(x) + sSE(x),   or max(cSE(x), sSE(x)), or cSE(x) ⊙ sSE(x)

    with cSE a `SqueezeExcitation` and sSE a `SpatialExcitation`, both applied to x. Feature maps
    `[batch, channels, height, width]` in and out; the gates are the children `channel` and
    `spatial`.

    Roy et al. 2018 (MICCAI) add the two. The authors' later paper (Recalibrating Fully
    Convolutional Networks, TMI 2019) compares ways to fuse them, and their code takes the maximum,
    fusion="max". It is the maximum of the outputs, not of the gates, so a negative value is scaled
    by the smaller gate. Their fusion by concatenation, which doubles the channels, is left out.

    Cost of an item, h the hidden channels: 2·channels·h + channels·height·width multiply-adds,
    beside pooling and scaling; 2·channels·h + h + 2·channels + 1 parameters.

    Args:
        channels, reduction, hidden_channels, bias: as in `SqueezeExcitation`; the paper's reduction
            is 2.
        fusion: how the two outputs are combined, "sum", "max" or "product".
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 2,
        hidden_channels: int | None = None,
        bias: bool = True,
        fusion: Literal["sum", "max", "product"] = "sum",
    ) -> None:
        choice(("sum", "max", "product"), fusion=fusion)
        super().__init__(
            SqueezeExcitation(
                channels, reduction=reduction, hidden_channels=hidden_channels, bias=bias
            ),
            SpatialExcitation(channels, bias=bias),
            mode=fusion,
            names=("channel", "spatial"),
        )


class EfficientChannelAttention(Gate):
    """ECA: a gate for each channel, from the means of the channels next to it.

        y = x ⊙ σ(w ∗ z),   z = mean of x over the pixels

    with ∗ a convolution of width k along the channels, with zero padding. Feature maps
    `[batch, channels, height, width]` in and out, gate map `[batch, channels, 1, 1]`.

    Wang et al. 2020 (ECA-Net), with their adaptive width: the odd number nearest to
    (log₂ channels + 1) / 2. Equal to timm's `EcaModule`, whose width also is at least 3. (The
    paper's rule gives a width of 1 for fewer than 8 channels, so that no channel sees another.) The
    default width of the authors' code is 3.

    Cost of an item: k·channels multiply-adds, beside pooling and scaling; k parameters.

    Args:
        channels: channels of the map; None: any number, and then `kernel_size` is needed.
        kernel_size: k, odd; None: the adaptive width.
    """

    def __init__(self, channels: int | None, *, kernel_size: int | None = None) -> None:
        super().__init__(channels)
        if kernel_size is None:
            if channels is None:
                raise ValueError("kernel_size: expected a number if channels is None, got None")
            kernel_size = max(3, int((math.log2(channels) + 1) / 2) | 1)
        odd(kernel_size=kernel_size)
        self.conv = nn.Conv1d(1, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def gate(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3))
        return self.conv(mean[:, None]).sigmoid().transpose(1, 2)[..., None]


class CoordinateAttention(Gate):
    """Coordinate attention: a gate for each channel and row, times one for each channel and column.

        y = x ⊙ σ(W_h f_h) ⊙ σ(W_w f_w),   f = hardswish(norm(W [z_h, z_w]))

    with z_h the means of the rows and z_w those of the columns, concatenated; f_h and f_w are the
    parts of f that belong to rows and to columns. All W are 1 × 1 convolutions. Feature maps
    `[batch, channels, height, width]` in and out, gate map `[batch, channels, height, width]`.

    Hou et al. 2021 (Coordinate Attention), with the sizes, biases and activation of the authors'
    code. Equal to timm's `CoordAttn` without its skip connection and with the same number of hidden
    channels; timm has no biases by default.

    In training, items of a batch see each other through the batch normalization over rows and
    columns.

    Cost of an item, h the hidden channels: 2·(height + width)·channels·h multiply-adds, beside
    pooling and scaling; 3·channels·h + 3·h + 2·channels parameters, without biases
    3·channels·h + 2·h.

    Args:
        channels, hidden_channels: as in `SqueezeExcitation`.
        reduction: divisor of `channels` that gives the hidden channels, rounded down, at least 8.
        bias: whether the convolutions add a bias.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 32,
        hidden_channels: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(channels)
        hidden = hidden_width(channels, reduction, hidden_channels, least=8)
        self.reduce = nn.Conv2d(channels, hidden, 1, bias=bias)
        self.norm = nn.BatchNorm2d(hidden)
        self.expand_rows = nn.Conv2d(hidden, channels, 1, bias=bias)
        self.expand_columns = nn.Conv2d(hidden, channels, 1, bias=bias)

    def gate(self, x: Tensor) -> Tensor:
        strips = torch.cat([x.mean(3), x.mean(2)], dim=2)[..., None]
        strips = F.hardswish(self.norm(self.reduce(strips)))
        rows, columns = strips.split(list(x.shape[2:]), dim=2)
        columns = columns.transpose(2, 3)
        return self.expand_rows(rows).sigmoid() * self.expand_columns(columns).sigmoid()
