"""Sinusoidal positions, fixed tables: of tokens in a line and of patches in a picture.

A grid is (rows, columns) of patches, numbered row by row as a picture is read.
"""

from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.arguments import at_least


def sincos_1d(
    num_positions: int, dim: int, *, temperature: float = 10000.0
) -> Annotated[Tensor, "positions dim"]:
    """Fixed sinusoidal positions; add row p to the token at p.

        row p = [sin(p w), cos(p w)],   w_i = temperature ** (-i / (dim / 2)), i = 0 … dim / 2 - 1

    Row p + k is row p with each pair (sin, cos) turned by k w_i, so that products of rows depend
    on the difference of their positions only. Of Vaswani et al., Attention Is All You Need, 2017,
    who put sine and cosine of a frequency side by side where we have all sines first: a fixed
    permutation of channels. PyG's `PositionalEncoding` divides by dim / 2 - 1 instead.

    Raises:
        ValueError: dim is odd or a size is not positive.
    """
    at_least(1, num_positions=num_positions, dim=dim)
    if dim % 2:
        raise ValueError(f"dim: {dim} is not a multiple of 2, as sinusoidal positions need")
    angles = band_angles(torch.arange(num_positions), dim // 2, temperature)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.get_default_dtype())


def sincos_2d(
    grid: tuple[int, int], dim: int, *, temperature: float = 10000.0
) -> Annotated[Tensor, "patches dim"]:
    """Fixed 2-D sinusoidal positions, row by row.

    A patch at (row y, column x) gets `[sin(x w), cos(x w), sin(y w), cos(y w)]` with dim / 4
    frequencies `w_i = temperature ** (-i / (dim / 4))` and x, y counted in patches.

    This is the layout of MoCo v3 (Chen et al. 2021) and MAE (He et al. 2022). big_vision divides
    by dim / 4 - 1 instead; timm's `build_sincos2d_pos_embed` orders the channels differently.

    Raises:
        ValueError: dim is not a multiple of 4 or a size is not positive.
    """
    if dim % 4:
        raise ValueError(f"dim: {dim} is not a multiple of 4, as 2-D sinusoidal positions need")
    y, x = band_angles(grid_points(grid), dim // 4, temperature)
    table = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)
    return table.to(torch.get_default_dtype())


def grid_points(grid: tuple[int, int]) -> Tensor:
    """Row and column of each patch, integers `[2, rows * columns]`."""
    at_least(1, rows=grid[0], columns=grid[1])
    rows, columns = (torch.arange(size) for size in grid)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)


def band_angles(points: Tensor, num_bands: int, temperature: float) -> Tensor:
    """points · temperature ** (-i / num_bands), `[..., num_bands]`.

    In float64: the rounding of a frequency is multiplied by the position, which may be large.
    """
    exponents = -torch.arange(num_bands, dtype=torch.float64) / num_bands
    return points.unsqueeze(-1) * temperature**exponents
