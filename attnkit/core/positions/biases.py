"""Position biases, which are passed as `bias=` and go together with any mask."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least


class ALiBi(nn.Module):
    """Linear position biases that are not learned (Press et al., Train Short, Test Long, 2022).

        bias[h, i, j] = −slope_h · |j − i|,   slope_h = 2^(−8 h / num_heads), h = 1 … num_heads

    If num_heads is not a power of two, the slopes are those of the next smaller power of two,
    then every other slope of twice that power, as in the authors' code. Under `Causal` this equals
    the paper's own form, slope_h · j; without `Causal` it is the symmetric form.

    Args:
        num_heads: query heads.
    """

    slopes: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        at_least(1, num_heads=num_heads)
        self.register_buffer("slopes", torch.empty(num_heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the slopes; nothing is learned."""
        num_heads = len(self.slopes)
        closest = 2 ** int(math.log2(num_heads))
        slopes = _geometric(closest) + _geometric(2 * closest)[::2][: num_heads - closest]
        self.slopes.copy_(torch.tensor(slopes, device="cpu"))

    def forward(
        self, num_queries: int, num_keys: int | None = None, *, offset: int = 0
    ) -> Annotated[Tensor, "1 heads queries keys"]:
        """Return the bias; query i has the position of key i + offset."""
        distance = _distances(num_queries, num_keys, offset, self.slopes.device)
        return -self.slopes[:, None, None] * distance.abs().to(self.slopes.dtype)[None, None]


class RelativeBias1d(nn.Module):
    """A learned bias for each head and distance, clipped (Shaw et al. 2018; on scores, T5, 2020).

        bias[h, i, j] = table[clip(j − i, −max_distance, max_distance) + max_distance, h]

    T5 shares far distances in logarithmic buckets; here each distance up to `max_distance` has an
    entry of its own.

    Args:
        num_heads: query heads.
        max_distance: larger distances share the entry of this one.
    """

    def __init__(self, num_heads: int, max_distance: int) -> None:
        super().__init__()
        at_least(1, num_heads=num_heads, max_distance=max_distance)
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.empty(2 * max_distance + 1, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the table with a truncated normal distribution."""
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(
        self, num_queries: int, num_keys: int | None = None, *, offset: int = 0
    ) -> Annotated[Tensor, "1 heads queries keys"]:
        """Return the bias; query i has the position of key i + offset."""
        distance = _distances(num_queries, num_keys, offset, self.table.device)
        rows = distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return _look_up(self.table, rows)


class RelativeBias2d(nn.Module):
    """A learned bias for each head and offset on a grid (Liu et al., Swin Transformer, 2021).

        bias[h, i, j] = table[(y_i − y_j + height − 1) · (2 width − 1) + x_i − x_j + width − 1, h]

    The table has the layout of Swin, torchvision and timm, so that their weights can be copied as
    they are. Tokens before the grid have a bias of 0.

    Args:
        num_heads: query heads.
        height, width: the size of the grid, whose tokens are stored row by row.
        num_prefix_tokens: the number of class or register tokens before the grid.
    """

    rows: Tensor

    def __init__(
        self, num_heads: int, height: int, width: int, *, num_prefix_tokens: int = 0
    ) -> None:
        super().__init__()
        at_least(1, num_heads=num_heads, height=height, width=width)
        at_least(0, num_prefix_tokens=num_prefix_tokens)
        self.height, self.width, self.num_prefix_tokens = height, width, num_prefix_tokens
        self.table = nn.Parameter(torch.empty((2 * height - 1) * (2 * width - 1), num_heads))
        rows = torch.empty(height * width, height * width, dtype=torch.long)
        self.register_buffer("rows", rows, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the table truncated normal, and compute which rows are read."""
        nn.init.trunc_normal_(self.table, std=0.02)
        y = torch.arange(self.height, device="cpu").repeat_interleave(self.width)
        x = torch.arange(self.width, device="cpu").repeat(self.height)
        down = y[:, None] - y + self.height - 1
        right = x[:, None] - x + self.width - 1
        self.rows.copy_(down * (2 * self.width - 1) + right)

    def forward(self) -> Annotated[Tensor, "1 heads tokens tokens"]:
        """Return the bias of all tokens, prefix and grid."""
        prefix = self.num_prefix_tokens
        return F.pad(_look_up(self.table, self.rows), (prefix, 0, prefix, 0))

    @torch.no_grad()
    def resized(self, height: int, width: int) -> "RelativeBias2d":
        """Return the bias for another grid: the table is resampled bicubically, as Swin does."""
        num_heads = self.table.shape[1]
        new = RelativeBias2d(num_heads, height, width, num_prefix_tokens=self.num_prefix_tokens)
        new = new.to(self.table.device, self.table.dtype)
        dtype = torch.promote_types(self.table.dtype, torch.float32)
        old_size, new_size = ((2 * h - 1, 2 * w - 1) for h, w in (
            (self.height, self.width), (height, width)))  # fmt: skip
        maps = self.table.to(dtype).T.reshape(1, num_heads, *old_size)
        if old_size != new_size:
            maps = F.interpolate(maps, size=new_size, mode="bicubic", align_corners=False)
        new.table.copy_(maps.reshape(num_heads, -1).T)
        return new


def _distances(num_queries: int, num_keys: int | None, offset: int, device: torch.device) -> Tensor:
    """Return j − i − offset, [queries, keys]."""
    keys = torch.arange(num_queries if num_keys is None else num_keys, device=device)
    return keys - torch.arange(num_queries, device=device)[:, None] - offset


def _look_up(table: Tensor, rows: Tensor) -> Tensor:
    entries = table.index_select(0, rows.flatten())
    return entries.unflatten(0, rows.shape).permute(2, 0, 1)[None]


def _geometric(num_heads: int) -> list[float]:
    return [2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)]
