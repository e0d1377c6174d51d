"""What networks add to scores by position, and Swin V2's score, around their own parameters."""

from __future__ import annotations

from math import log

from torch import Tensor, nn

from attnkit.core.scores.kinds import Cosine

__all__ = ["ClampedCosine", "CoordinateBias", "GivenBias", "TableBias"]


class TableBias(nn.Module):
    """bias[h, i, j] = table[index[i, j], h], with a network's own table and index."""

    index: Tensor

    def __init__(self, table: nn.Parameter, index: Tensor) -> None:
        super().__init__()
        self.table = table
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """[1, heads, tokens, tokens]."""
        return self.table[self.index].permute(2, 0, 1)[None]


class CoordinateBias(nn.Module):
    """bias[h, i, j] = 16 · sigmoid(mlp(coordinates))[index[i, j], h] (Liu et al., Swin Transformer
    V2, 2022)."""

    coordinates: Tensor
    index: Tensor

    def __init__(self, mlp: nn.Module, coordinates: Tensor, index: Tensor) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("coordinates", coordinates, persistent=False)
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """[1, heads, tokens, tokens]."""
        table = self.mlp(self.coordinates).flatten(0, -2)
        return 16 * table[self.index].permute(2, 0, 1)[None].sigmoid()


class GivenBias(nn.Module):
    """The bias of one of timm's modules for relative positions."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> Tensor:
        """[1, heads, tokens, tokens]."""
        return self.module.get_bias()  # type: ignore[operator]


class ClampedCosine(nn.Module):
    """`Cosine` with Swin V2's temperature per head, exp(−logit_scale) and at least 0.01."""

    def __init__(self, logit_scale: nn.Parameter) -> None:
        super().__init__()
        self.logit_scale = logit_scale

    def forward(self) -> Cosine:
        return Cosine(self.logit_scale.flatten().clamp(max=log(100)).neg().exp())
