"""The bottleneck attention module."""

from torch import Tensor, nn

from attnkit.core.arguments import at_least
from attnkit.layers.gates.gate import Gate, hidden_width


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
