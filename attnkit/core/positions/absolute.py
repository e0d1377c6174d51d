"""Absolute positions, added to tokens: fixed sinusoidal tables, and learned ones that can be
resampled to another length or grid.

A grid is (rows, columns) of patches, which are numbered row by row.
"""

from typing import Annotated, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least
from attnkit.core.operators.precision import wide


class Resampling(NamedTuple):
    """How learned positions are resampled to another grid.

    Attributes:
        mode: "bicubic" or "bilinear".
        antialias: whether resampling to a smaller grid averages neighbours, as in `F.interpolate`.
        square: whether they are resampled to a square with the grid's longer side, of which the
            upper left part is taken, so that rows and columns are scaled alike.
    """

    mode: str = "bicubic"
    antialias: bool = True
    square: bool = False

    def whole(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the grid that positions are resampled to; `grid` is its upper left part."""
        return (max(grid), max(grid)) if self.square else grid


BICUBIC = Resampling()
"""The resampling of timm's Vision Transformers."""


def sincos_1d(
    num_positions: int, dim: int, *, temperature: float = 10000.0
) -> Annotated[Tensor, "positions dim"]:
    """Return a table of fixed sinusoidal positions; row p is added to the token at position p.

        row p = [sin(p w), cos(p w)],   w_i = temperature ** (-i / (dim / 2)), i = 0 … dim / 2 - 1

    Row p + k is row p with each pair (sin, cos) rotated by k w_i, so that products of rows depend
    on the difference of their positions only. Vaswani et al., Attention Is All You Need, 2017, put
    the sine and cosine of a frequency side by side; here all sines come first, which is a fixed
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
    """Return a table of fixed 2-D sinusoidal positions, row by row.

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
    """Return the row and column of each patch, integers `[2, rows * columns]`."""
    at_least(1, rows=grid[0], columns=grid[1])
    rows, columns = (torch.arange(size) for size in grid)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)


def band_angles(points: Tensor, num_bands: int, temperature: float) -> Tensor:
    """Return points · temperature ** (-i / num_bands), `[..., num_bands]`.

    It is computed in float64, because the rounding error of a frequency is multiplied by the
    position, which may be large.
    """
    exponents = -torch.arange(num_bands, dtype=torch.float64) / num_bands
    return points.unsqueeze(-1) * temperature**exponents


class _Tables(nn.Module):
    """Base class of learned positions; every parameter is a table of vectors, which are summed."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def reset_parameters(self) -> None:
        """Initialize the tables truncated normal; their sum has the standard deviation `std`."""
        tables = list(self.parameters())
        for table in tables:
            nn.init.trunc_normal_(table, std=self.std / len(tables) ** 0.5)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters to which an optimiser should apply no weight decay."""
        return {name for name, _ in self.named_parameters()}


class LearnedPositions1d(_Tables):
    """A learned vector per position of a sequence: `tokens + table[start : start + num_tokens]`.

    Source: Gehring et al. 2017; BERT (Devlin et al. 2019). Input and output are tokens
    `[batch, tokens, dim]`; there may be fewer tokens than positions.

    Args:
        num_positions: rows of the table.
        dim: channels.
        std: initial standard deviation of the table.

    Raises:
        ValueError: a size is not positive; there are tokens beyond the table, or of another width.
    """

    def __init__(self, num_positions: int, dim: int, *, std: float = 0.02) -> None:
        super().__init__(std)
        at_least(1, num_positions=num_positions, dim=dim)
        self.table = nn.Parameter(torch.empty(num_positions, dim))
        self.reset_parameters()

    def forward(
        self, tokens: Annotated[Tensor, "batch tokens dim"], *, start: int = 0
    ) -> Annotated[Tensor, "batch tokens dim"]:
        """Return the tokens with their positions added; the first token is at `start`."""
        _check_width(tokens, self.table)
        num_positions, end = len(self.table), start + tokens.shape[-2]
        if start < 0 or end > num_positions:
            raise ValueError(
                f"tokens: positions {start} to {end - 1}, but num_positions is {num_positions}"
            )
        return tokens + self.table[start:end]

    def resize(self, num_positions: int) -> "LearnedPositions1d":
        """Resample the table to another length, in place; returns self.

        The resampling is bicubic with antialiasing, as for grids. The parameter is a new one, so
        resize before you make an optimiser.
        """
        at_least(1, num_positions=num_positions)
        self.table = _resized(self.table, (len(self.table), 1), (num_positions, 1))
        return self

    def extra_repr(self) -> str:
        return f"num_positions={self.table.shape[0]}, dim={self.table.shape[1]}"


class _GridPositions(_Tables):
    """Base class of learned positions for the patches of a grid; tokens before it are unchanged.

    A learned token before the grid needs no position, which could be a part of the token.
    """

    def __init__(
        self, grid: tuple[int, int], dim: int, *, num_prefix_tokens: int = 0, std: float = 0.02
    ) -> None:
        super().__init__(std)
        at_least(1, rows=grid[0], columns=grid[1], dim=dim)
        at_least(0, num_prefix_tokens=num_prefix_tokens)
        self.grid = grid
        self.dim = dim
        self.num_prefix_tokens = num_prefix_tokens
        for name, (rows, columns) in self._tables(grid).items():
            self.register_parameter(name, nn.Parameter(torch.empty(rows * columns, dim)))
        self.reset_parameters()

    @staticmethod
    def _tables(grid: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Return the grid of vectors that each table holds, by the table's name."""
        raise NotImplementedError

    def positions(self) -> Tensor:
        """Return the vectors of all patches, `[rows * columns, dim]`, row by row."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens, prefix and patches, with the patches' positions added."""
        positions = self.positions()
        _check_width(tokens, positions)
        if tokens.shape[-2] != self.num_prefix_tokens + len(positions):
            raise ValueError(
                f"tokens: {tokens.shape[-2]} tokens, expected {self.num_prefix_tokens} before "
                f"the grid {self.grid[0]} x {self.grid[1]}"
            )
        return tokens + F.pad(positions, (0, 0, self.num_prefix_tokens, 0))

    def resize(self: "Positions", grid: tuple[int, int], how: Resampling = BICUBIC) -> "Positions":
        """Resample every table to another grid, in place; returns self. See `resize_positions`.

        The parameters are new ones, so resize before you make an optimiser.
        """
        at_least(1, rows=grid[0], columns=grid[1])
        before, whole = self._tables(self.grid), self._tables(how.whole(grid))
        for name, size in self._tables(grid).items():
            table = _resized(getattr(self, name), before[name], size, how, whole[name])
            setattr(self, name, table)
        self.grid = grid
        return self

    def extra_repr(self) -> str:
        return f"grid={self.grid}, dim={self.dim}, num_prefix_tokens={self.num_prefix_tokens}"


Positions = TypeVar("Positions", bound=_GridPositions)


class LearnedPositions2d(_GridPositions):
    """A learned vector per patch (Dosovitskiy et al., An image is worth 16x16 words, 2021).

        patch (y, x) + table[y · columns + x]

    Input and output are tokens `[batch, num_prefix_tokens + rows · columns, dim]`; those before the
    grid (class, registers) are unchanged.

    Args:
        grid: rows and columns of patches.
        dim: channels.
        num_prefix_tokens: tokens before the grid.
        std: initial standard deviation of the table.

    Raises:
        ValueError: a size is not positive; the tokens have another number or width.
    """

    table: Tensor

    @staticmethod
    def _tables(grid: tuple[int, int]) -> dict[str, tuple[int, int]]:
        return {"table": grid}

    def positions(self) -> Tensor:
        return self.table


class FactorizedPositions2d(_GridPositions):
    """A learned vector per row and one per column, added (Dehghani et al., NaViT, 2023).

        patch (y, x) + row_table[y] + column_table[x]

    The difference p(y, x) − p(y′, x) is the same in every column; there are (rows + columns) · dim
    parameters. These are NaViT's factorised absolute positions in the form that adds and counts in
    patches (NaViT also tries products, concatenation and fractions of the image).

    Args:
        std: initial standard deviation of the sum; that of each table is std / √2.
        grid, dim, num_prefix_tokens: as in `LearnedPositions2d`, like tokens and errors.
    """

    row_table: Tensor
    column_table: Tensor

    @staticmethod
    def _tables(grid: tuple[int, int]) -> dict[str, tuple[int, int]]:
        return {"row_table": (grid[0], 1), "column_table": (grid[1], 1)}

    def positions(self) -> Tensor:
        return (self.row_table[:, None] + self.column_table).flatten(0, 1)


def resize_positions(
    positions: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    how: Resampling = BICUBIC,
    whole: tuple[int, int] | None = None,
) -> Tensor:
    """Resample learned positions `[…, rows * columns, dim]` to another grid.

    They are resampled to the grid `whole` (None: `how.whole(new_grid)`), of which the upper left
    part is returned. The default is bicubic with antialiasing, as in timm's
    `resample_abs_pos_embed` (equal in float32; float64 is kept here, where timm computes in
    float32). Positions that are linear in y and x stay linear away from the edges when the grid
    grows.

    Raises:
        ValueError: positions do not fill old_grid.
    """
    num_positions, dim = positions.shape[-2:]
    if num_positions != old_grid[0] * old_grid[1]:
        raise ValueError(
            f"positions: {num_positions} rows do not fill old_grid {old_grid[0]} x {old_grid[1]}"
        )
    if old_grid == new_grid and whole in (None, old_grid):
        return positions
    whole = whole or how.whole(new_grid)
    # antialiased interpolation exists in float32 and float64 only
    dtype = wide(positions.dtype)
    maps = positions.to(dtype).reshape(-1, *old_grid, dim).permute(0, 3, 1, 2)
    if old_grid != whole:
        maps = F.interpolate(maps, size=whole, mode=how.mode, antialias=how.antialias)
    maps = maps[:, :, : new_grid[0], : new_grid[1]]
    rows = maps.permute(0, 2, 3, 1).to(positions.dtype)
    return rows.reshape(*positions.shape[:-2], new_grid[0] * new_grid[1], dim)


def _resized(
    table: nn.Parameter,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    how: Resampling = BICUBIC,
    whole: tuple[int, int] | None = None,
) -> nn.Parameter:
    if old_grid == new_grid and whole in (None, old_grid):
        return table
    resized = resize_positions(table.detach(), old_grid, new_grid, how, whole)
    return nn.Parameter(resized, requires_grad=table.requires_grad)


def _check_width(tokens: Tensor, table: Tensor) -> None:
    if tokens.ndim != 3 or tokens.shape[-1] != table.shape[-1]:
        raise ValueError(
            f"tokens: expected [batch, tokens, {table.shape[-1]}], got {list(tokens.shape)}"
        )
