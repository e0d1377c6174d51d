"""Where a patch stands: 2-D sinusoidal tables, learned tables that can be resized, 2-D rotary.

A grid is (rows, columns) of patches, numbered row by row as a picture is read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sincos_2d(grid: tuple[int, int], dim: int, *, temperature: float = 10000.0) -> Tensor:
    """Fixed 2-D sinusoidal positions, `[rows * columns, dim]`.

    A patch at (row y, column x) gets `[sin(x w), cos(x w), sin(y w), cos(y w)]` with dim / 4
    frequencies `w_i = temperature ** (-i / (dim / 4))` and x, y counted in patches.

    This is the layout of MoCo v3 (Chen et al. 2021) and MAE (He et al. 2022). big_vision divides
    by dim / 4 - 1 instead; timm's `build_sincos2d_pos_embed` orders the channels differently.

    Raises:
        ValueError: dim is no multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"dim: {dim} is not a multiple of 4, as 2-D sinusoidal positions need")
    angles = _axis_angles(grid, dim // 4, temperature)
    y, x = angles.unbind(0)
    table = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)
    return table.to(torch.get_default_dtype())


def resize_positions(
    positions: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Resample learned positions `[1, rows * columns, dim]` to another grid.

    Bicubic with antialiasing, as timm's `resample_abs_pos_embed` does (equal in float32; we keep
    float64 where timm goes through float32).

    Raises:
        ValueError: positions do not fill old_grid.
    """
    num_positions, dim = positions.shape[-2:]
    if num_positions != old_grid[0] * old_grid[1]:
        raise ValueError(
            f"positions: {num_positions} rows do not fill old_grid {old_grid[0]} x {old_grid[1]}"
        )
    if old_grid == new_grid:
        return positions
    # antialiased interpolation exists in float32 and float64 only
    dtype = positions.dtype if positions.dtype == torch.float64 else torch.float32
    maps = positions.to(dtype).reshape(1, *old_grid, dim).permute(0, 3, 1, 2)
    maps = F.interpolate(maps, size=new_grid, mode="bicubic", antialias=True)
    return maps.permute(0, 2, 3, 1).reshape(1, -1, dim).to(positions.dtype)


class Rotation:
    """One rotation per token, ready to apply: `(query, key) -> (query, key)`.

    query `[batch, heads, queries, head_dim]` and key `[batch, heads, keys, head_dim]` are turned
    by the angles of their tokens and come back in their own dtype.
    """

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        query_cos: Tensor | None = None,
        query_sin: Tensor | None = None,
    ) -> None:
        self.cos, self.sin = cos, sin
        self.query_cos = cos if query_cos is None else query_cos
        self.query_sin = sin if query_sin is None else query_sin

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (
            _rotate("query", query, self.query_cos, self.query_sin),
            _rotate("key", key, self.cos, self.sin),
        )

    def first_queries(self, num_queries: int) -> "Rotation":
        """The same rotation where only the first tokens ask and all answer."""
        cos, sin = self.cos[..., :num_queries, :], self.sin[..., :num_queries, :]
        return Rotation(self.cos, self.sin, cos, sin)


class Rotary2d(nn.Module):
    """Axial 2-D rotary positions: `(query, key) -> (query, key)`, scores see differences only.

    Of head_dim / 2 channel pairs (channel i with channel i + head_dim / 2) the first half turns by
    `y * w_i`, the second by `x * w_i`, with `w_i = temperature ** (-i / (head_dim / 4))` and y, x
    in patches, so `<R(p) q, R(p') k>` depends on `p - p'`. The first `num_prefix_tokens` tokens
    (class, registers) have no place in the image and are left as they are, exactly.

    Su et al. 2021 in its axial 2-D form with temperature 100 (Heo et al., RoPE-ViT, 2024). We
    split the pairs in halves where Heo et al. interleave them: a fixed permutation of channels.

    Raises:
        ValueError: head_dim is no multiple of 4.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        grid: tuple[int, int],
        *,
        num_prefix_tokens: int = 0,
        temperature: float = 100.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 4:
            raise ValueError(
                f"head_dim: {head_dim} is not a multiple of 4, as 2-D rotary positions need"
            )
        self.num_prefix_tokens = num_prefix_tokens
        angles = torch.cat(tuple(_axis_angles(grid, head_dim // 4, temperature)), dim=-1)
        # a prefix token turns by 0: cos 1, sin 0, which multiplies out to the same bits
        angles = F.pad(angles, (0, 0, num_prefix_tokens, 0))
        dtype = dtype or torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotation()(query, key)

    def rotation(self, kept: Tensor | None = None) -> Rotation:
        """The rotation of all tokens, or of prefix and patches `kept` `[batch, patches]` alone."""
        if kept is None:
            return Rotation(self.cos, self.sin)
        prefix = torch.arange(self.num_prefix_tokens, device=kept.device)
        rows = torch.cat([prefix.expand(kept.shape[0], -1), kept + self.num_prefix_tokens], dim=1)
        return Rotation(self.cos[rows].unsqueeze(1), self.sin[rows].unsqueeze(1))


def _axis_angles(grid: tuple[int, int], num_bands: int, temperature: float) -> Tensor:
    """Angles `[2, rows * columns, num_bands]` of the row and of the column, in float64."""
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in grid)
    points = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)
    bands = temperature ** (-torch.arange(num_bands, dtype=torch.float64) / num_bands)
    return points.unsqueeze(-1) * bands


def _rotate(name: str, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if tokens.shape[-2] != cos.shape[-2]:
        raise ValueError(
            f"{name}: {tokens.shape[-2]} tokens, but the rotation is for {cos.shape[-2]}"
        )
    first, second = tokens.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(tokens.dtype)
