"""Relative positions, by which scores depend on distances: rotary ones, which rotate queries and
keys, and biases, which are passed as `bias=` and go together with any mask.

Source of rotary positions: Su et al., RoFormer: Enhanced Transformer with Rotary Position
Embedding, 2021. Channel i makes a pair with channel i + head_dim / 2, as in GPT-NeoX and Llama;
RoFormer pairs neighbouring channels, which is a fixed permutation of channels.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least
from attnkit.core.positions.absolute import band_angles, grid_points

Query = Annotated[Tensor, "batch heads queries head_dim"]
Key = Annotated[Tensor, "batch kv_heads keys head_dim"]


class Rotation:
    """A function `(query, key) -> (query, key)` that rotates each token by its angles.

    Query and key keep their dtypes.

    Args:
        cos, sin: cosines and sines of the angles, `[tokens, head_dim / 2]` or
            `[batch, 1, tokens, head_dim / 2]`.
        query_cos, query_sin: those of the queries, if these are other tokens than the keys.
    """

    def __init__(
        self,
        cos: Annotated[Tensor, "*batch keys bands"],
        sin: Annotated[Tensor, "*batch keys bands"],
        query_cos: Annotated[Tensor, "*batch queries bands"] | None = None,
        query_sin: Annotated[Tensor, "*batch queries bands"] | None = None,
    ) -> None:
        self.cos, self.sin = cos, sin
        self.query_cos = cos if query_cos is None else query_cos
        self.query_sin = sin if query_sin is None else query_sin

    def __call__(self, query: Query, key: Key) -> tuple[Query, Key]:
        return (
            _rotate("query", query, self.query_cos, self.query_sin),
            _rotate("key", key, self.cos, self.sin),
        )

    def first_queries(self, num_queries: int) -> "Rotation":
        """Return the rotation for which only the first tokens are queries; all tokens are keys."""
        return self.queries_at(slice(num_queries))

    def queries_at(self, rows: slice | Annotated[Tensor, "rows", int]) -> "Rotation":
        """Return the rotation for which only the tokens in these rows are queries."""
        return Rotation(self.cos, self.sin, self.cos[..., rows, :], self.sin[..., rows, :])

    def to(self, device: torch.device, dtype: torch.dtype) -> "Rotation":
        """Return the rotation on a device and in a dtype, for which all tokens are queries."""
        return Rotation(self.cos.to(device, dtype), self.sin.to(device, dtype))

    @staticmethod
    def joined(rotations: "Sequence[Rotation]") -> "Rotation":
        """Return the rotation of the concatenated tokens of several rotations without a batch, or
        with a batch of one."""
        bands = rotations[0].cos.shape[-1]
        cos = torch.cat([rotation.cos.reshape(-1, bands) for rotation in rotations])
        return Rotation(cos, torch.cat([rotation.sin.reshape(-1, bands) for rotation in rotations]))


class _Rotary(nn.Module):
    """Base class of rotary positions: a table of the cosines and sines of each token's angles.

    The angles are computed in float64 and rounded once, to `dtype`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, angles: Callable[[], Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()
        self._angles = angles
        table = angles().to(dtype or torch.get_default_dtype())
        self.register_buffer("cos", torch.empty_like(table), persistent=False)
        self.register_buffer("sin", torch.empty_like(table), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables; nothing is learned."""
        with torch.device("cpu"):
            angles = self._angles()
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _of(self, rows: Tensor) -> Rotation:
        """Return the rotation of tokens by their rows of the table, integers `[batch, tokens]`."""
        cos, sin = (F.embedding(rows, table).unsqueeze(1) for table in (self.cos, self.sin))
        return Rotation(cos, sin)


class Rotary1d(_Rotary):
    """Rotary positions of a sequence, `(query, key) -> (query, key)`; scores depend on distances
    only.

        pair i of the token at p is rotated by p · w_i,   w_i = temperature ** (-i / (head_dim / 2))

    The product `<R(p) q, R(p') k>` depends on `p - p'`, and no length changes. Pass the module as
    `positions=` to `MultiHeadAttention` if tokens are numbered from 0, otherwise `rotation(…)`.
    A key is rotated once, before it is cached:

        block(new_tokens, positions=rotary.rotation(num_new, start=num_cached), …)

    Source: Su et al. 2021, in the channel layout of Llama (Touvron et al. 2023).

    Args:
        head_dim: channels of a head, a multiple of 2.
        max_tokens: the number of positions, 0 … max_tokens - 1.
        temperature: the slowest pair is rotated by about 1 / temperature per token.
        dtype: the dtype of the table; None: torch's default.

    Raises:
        ValueError: head_dim is odd, a size is not positive, or a position is max_tokens or larger.
    """

    def __init__(
        self,
        head_dim: int,
        max_tokens: int,
        *,
        temperature: float = 10000.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        at_least(1, head_dim=head_dim, max_tokens=max_tokens)
        if head_dim % 2:
            raise ValueError(
                f"head_dim: {head_dim} is not a multiple of 2, as rotary positions need"
            )
        super().__init__(partial(_on_a_line, max_tokens, head_dim, temperature), dtype)
        self.max_tokens = max_tokens

    def forward(self, query: Query, key: Key) -> tuple[Query, Key]:
        """Return query and key, rotated as tokens 0, 1, …"""
        return self.rotation(key.shape[-2])(query, key)

    def rotation(self, num_tokens: int, start: int = 0) -> Rotation:
        """Return the rotation of the tokens start … start + num_tokens - 1."""
        end = start + num_tokens
        if start < 0 or end > self.max_tokens:
            raise ValueError(
                f"start and num_tokens: positions {start} to {end - 1}, "
                f"but max_tokens is {self.max_tokens}"
            )
        return Rotation(self.cos[start:end], self.sin[start:end])

    def rotation_at(self, positions: Annotated[Tensor, "batch tokens", int]) -> Rotation:
        """Return the rotation of tokens at the given positions.

        It serves packed sequences, whose positions each begin at 0, and padding on the left. The
        positions are not checked inside torch.compile, where reading them would break the graph.
        """
        if positions.ndim != 2 or positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "positions: expected integers [batch, tokens], "
                f"got {positions.dtype} {list(positions.shape)}"
            )
        if positions.numel() and not torch.compiler.is_compiling():
            lowest, highest = (int(bound) for bound in positions.aminmax())
            if lowest < 0 or highest >= self.max_tokens:
                raise ValueError(
                    f"positions: {lowest} to {highest}, but max_tokens is {self.max_tokens}"
                )
        return self._of(positions)

    def extra_repr(self) -> str:
        return f"head_dim={2 * self.cos.shape[1]}, max_tokens={self.max_tokens}"


class Rotary2d(_Rotary):
    """Axial 2-D rotary positions, `(query, key) -> (query, key)`; scores depend on offsets only.

    The first half of the head_dim / 2 channel pairs is rotated by `y * w_i`, the second by `x *
    w_i`, with `w_i = temperature ** (-i / (head_dim / 4))` and y, x in patches, so `<R(p) q, R(p')
    k>` depends on `p - p'`. The first `num_prefix_tokens` tokens (class, registers) have no
    position in the image and are returned unchanged, bit for bit.

    Source: Su et al. 2021 in its axial 2-D form with temperature 100 (Heo et al., RoPE-ViT, 2024).
    The pairs are split in halves where Heo et al. interleave them, a fixed permutation of channels.

    Raises:
        ValueError: head_dim is not a multiple of 4, num_prefix_tokens is negative, or the grid is
            empty.
    """

    def __init__(
        self,
        head_dim: int,
        grid: tuple[int, int],
        *,
        num_prefix_tokens: int = 0,
        temperature: float = 100.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        if head_dim % 4:
            raise ValueError(
                f"head_dim: {head_dim} is not a multiple of 4, as 2-D rotary positions need"
            )
        at_least(0, num_prefix_tokens=num_prefix_tokens)
        super().__init__(partial(_on_a_grid, grid, num_prefix_tokens, head_dim, temperature), dtype)
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, query: Query, key: Key) -> tuple[Query, Key]:
        """Return query and key of prefix and patches, rotated."""
        return self.rotation()(query, key)

    def rotation(self, kept: Annotated[Tensor, "batch patches", int] | None = None) -> Rotation:
        """Return the rotation of all tokens, or of the prefix and the patches `kept` only."""
        if kept is None:
            return Rotation(self.cos, self.sin)
        prefix = torch.arange(self.num_prefix_tokens, device=kept.device)
        prefix = prefix.expand(kept.shape[0], -1)
        return self._of(torch.cat([prefix, kept + self.num_prefix_tokens], dim=1))


def _on_a_line(max_tokens: int, head_dim: int, temperature: float) -> Tensor:
    return band_angles(torch.arange(max_tokens), head_dim // 2, temperature)


def _on_a_grid(
    grid: tuple[int, int], num_prefix_tokens: int, head_dim: int, temperature: float
) -> Tensor:
    y, x = band_angles(grid_points(grid), head_dim // 4, temperature)
    # a prefix token is rotated by 0: cos 1 and sin 0 leave its bits unchanged
    return F.pad(torch.cat([y, x], dim=-1), (0, 0, num_prefix_tokens, 0))


def _rotate(name: str, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if tokens.shape[-2] != cos.shape[-2]:
        raise ValueError(
            f"{name}: {tokens.shape[-2]} tokens, but the rotation is for {cos.shape[-2]}"
        )
    if tokens.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(
            f"{name}: head_dim {tokens.shape[-1]}, but the rotation is for {2 * cos.shape[-1]}"
        )
    first, second = tokens.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(tokens.dtype)


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
