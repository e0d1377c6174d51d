"""Efficient channel attention."""

import math

from torch import Tensor, nn

from attnkit.core.arguments import odd
from attnkit.layers.gates.gate import Gate


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
