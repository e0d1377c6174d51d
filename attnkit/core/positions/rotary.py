"""Rotary positions: queries and keys are rotated, so that scores depend on distances only.

Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021. Channel i
makes a pair with channel i + head_dim / 2, as in GPT-NeoX and Llama; RoFormer pairs neighbouring
channels, which is a fixed permutation of channels.
"""

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
