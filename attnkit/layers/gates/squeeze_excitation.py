"""Squeeze-and-excitation, by channel, by pixel, and both."""

from typing import Literal

from torch import Tensor, nn

from attnkit.core.arguments import choice
from attnkit.layers.gates.gate import Gate, hidden_width
from attnkit.layers.maps.combined import Combined


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
