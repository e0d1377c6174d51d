"""The bottleneck and the convolutional block attention module: gates over channels and pixels."""

from typing import Literal

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice, odd
from attnkit.layers.gates import Gate, hidden_width
from attnkit.layers.maps import Combined


class BAM(Gate):
    """BAM, the bottleneck attention module: a channel gate and a spatial gate in one.

        y = x + x ⊙ σ(C(x) + S(x))
        C(x) = norm(W₁ relu(W₀ mean of x over the pixels + b₀))
        S(x) = norm(f₃ relu(f₂ relu(f₁ relu(f₀ x))))

    C has one number for each channel, S one for each pixel; f₀ and f₃ are 1 × 1 convolutions, f₁
    and f₂ are dilated 3 × 3 convolutions with zero padding. Feature maps
    `[batch, channels, height, width]` in and out, gate map `[batch, channels, height, width]`.

    This follows the formulas of Park et al. 2018 (BAM): the branches are added and each ends in a
    batch normalization. The authors' code multiplies them and normalizes hidden layers instead. The
    formulas leave out the ReLUs, which are in the code.

    In training, items of a batch see each other through the batch normalization. C needs a batch of
    at least two: with one, torch raises "Expected more than 1 value per channel".

    Cost of an item, h the hidden channels: 2·channels·h + (channels·h + 18·h² + h)·height·width
    multiply-adds, beside pooling and scaling; 3·channels·h + 18·h² + 5·h + 2·channels + 2
    parameters.

    Args:
        channels, reduction, hidden_channels: as in `SqueezeExcitation`.
        dilation: dilation of the 3 × 3 convolutions, in pixels.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        hidden_channels: int | None = None,
        dilation: int = 4,
    ) -> None:
        super().__init__(channels)
        at_least(1, dilation=dilation)
        hidden = hidden_width(channels, reduction, hidden_channels)
        # a convolution before a batch norm has no bias, since the norm has one
        self.channel = nn.Sequential(
            nn.Conv2d(channels, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.spatial = nn.Sequential(
            nn.Conv2d(channels, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            nn.Conv2d(hidden, 1, 1, bias=False),
            nn.BatchNorm2d(1),
        )

    def gate(self, x: Tensor) -> Tensor:
        return (self.channel(x.mean((2, 3), keepdim=True)) + self.spatial(x)).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class CBAMChannelGate(Gate):
    """CBAM's channel attention: a gate for each channel, from the channels' means and maxima.

        y = x ⊙ σ(MLP(mean of x over the pixels) + MLP(maximum of x over the pixels))
        MLP(z) = W₁ relu(W₀ z)

    with one MLP for both. Feature maps `[batch, channels, height, width]` in and out, gate map
    `[batch, channels, 1, 1]`.

    Woo et al. 2018 (CBAM); their formula has no biases, their code has them. Equal to timm's
    `ChannelAttn` with the same number of hidden channels, which timm rounds instead of flooring.

    Cost of an item, h the hidden channels: 4·channels·h multiply-adds, beside pooling and scaling;
    2·channels·h parameters, with biases h + channels more.

    Args:
        channels, reduction, hidden_channels: as in `SqueezeExcitation`.
        bias: whether the MLP has biases.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        hidden_channels: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(channels)
        hidden = hidden_width(channels, reduction, hidden_channels)
        self.mlp = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=bias),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1, bias=bias),
        )

    def gate(self, x: Tensor) -> Tensor:
        mean, maximum = x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        return (self.mlp(mean) + self.mlp(maximum)).sigmoid()


class CBAMSpatialGate(Gate):
    """CBAM's spatial attention: a gate for each pixel, from its surroundings.

        y = x ⊙ σ(norm(W ∗ [mean, maximum of x over the channels]))

    with ∗ a k × k convolution over the two maps with zero padding. Feature maps
    `[batch, channels, height, width]` in and out, gate map `[batch, 1, height, width]`.

    Woo et al. 2018 (CBAM). Batch normalization is in the authors' code (with a momentum of 0.01;
    here torch's 0.1) and in timm's `SpatialAttn`, which this equals, but not in the paper's
    formula, which is `batch_norm=False`. With it, items of a batch see each other in training, and
    training needs more than one pixel in the whole batch.

    Cost of an item: 2·k²·height·width multiply-adds, beside pooling and scaling; 2·k² parameters
    and 2 of the norm, or one bias.

    Args:
        channels: channels of the map; None: any number, since no parameter depends on it.
        kernel_size: k, odd.
        batch_norm: whether there is a norm; without it the convolution has a bias.
    """

    def __init__(
        self, channels: int | None = None, *, kernel_size: int = 7, batch_norm: bool = True
    ) -> None:
        super().__init__(channels)
        odd(kernel_size=kernel_size)
        self.conv = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(1) if batch_norm else nn.Identity()

    def gate(self, x: Tensor) -> Tensor:
        pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], dim=1)
        return self.norm(self.conv(pooled)).sigmoid()


class CBAM(Combined):
    """CBAM, the convolutional block attention module: a channel gate, then a spatial gate.

        y = spatial(channel(x)),   or with order="spatial_first"   y = channel(spatial(x))

    with `CBAMChannelGate` and `CBAMSpatialGate`, the children `channel` and `spatial`; each gate is
    computed from the map that it scales. Feature maps `[batch, channels, height, width]` in and
    out.

    Woo et al. 2018 (CBAM), who compare both orders. The defaults equal timm's `CbamModule` with the
    same number of hidden channels. The two gates list their differences from the paper's formulas.
    `Combined(CBAMChannelGate(64), CBAMSpatialGate(64), mode="sum")` computes both gates from x.

    Cost of an item, h the hidden channels, k the kernel's size: 4·channels·h +
    2·k²·height·width multiply-adds, beside pooling and scaling; at the defaults 2·channels·h +
    2·k² + 2 parameters. In training, items of a batch see each other through the spatial gate's
    batch normalization.

    Args:
        channels, reduction, hidden_channels, bias: as in `CBAMChannelGate`.
        kernel_size, batch_norm: as in `CBAMSpatialGate`.
        order: which gate comes first.
    """

    def __init__(
        self,
        channels: int,
        *,
        reduction: int = 16,
        hidden_channels: int | None = None,
        bias: bool = False,
        kernel_size: int = 7,
        batch_norm: bool = True,
        order: Literal["channel_first", "spatial_first"] = "channel_first",
    ) -> None:
        choice(("channel_first", "spatial_first"), order=order)
        channel = CBAMChannelGate(
            channels, reduction=reduction, hidden_channels=hidden_channels, bias=bias
        )
        spatial = CBAMSpatialGate(channels, kernel_size=kernel_size, batch_norm=batch_norm)
        if order == "channel_first":
            super().__init__(channel, spatial, names=("channel", "spatial"))
        else:
            super().__init__(spatial, channel, names=("spatial", "channel"))
