"""Coordinate attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.layers.gates.gate import Gate, hidden_width


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
