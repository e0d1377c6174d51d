"""Feature maps [batch, channels, height, width] as tokens, and what a layer adds to them."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

ResidualKind = Literal["gamma", "add"]


def check_features(features: Tensor, channels: int) -> None:
    """ValueError unless these are feature maps of so many channels."""
    if features.ndim != 4 or features.shape[1] != channels:
        raise ValueError(
            f"features: expected [batch, {channels}, height, width], got {list(features.shape)}"
        )
    if 0 in features.shape[2:]:
        raise ValueError(f"features: expected at least one pixel, got {list(features.shape)}")


def to_tokens(features: Tensor) -> Tensor:
    """Pixels as tokens [batch, height · width, channels], row by row."""
    return features.flatten(2).transpose(1, 2)


def to_features(tokens: Tensor, height: int, width: int) -> Tensor:
    """The way back from `to_tokens`."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


class Residual(nn.Module):
    """How a layer's update goes into its feature map x.

    kind: "gamma", x + γ · update with one learned number γ that begins at 0, so that the layer
        begins as the identity (DANet, Fu et al. 2019); "add", x + update; None, the update alone.
    """

    def __init__(self, kind: ResidualKind | None) -> None:
        super().__init__()
        if kind not in (*get_args(ResidualKind), None):
            raise ValueError(f"residual: expected 'gamma', 'add' or None, got {kind!r}")
        self.kind = kind
        self.gamma = nn.Parameter(torch.zeros(1)) if kind == "gamma" else None

    def forward(self, features: Tensor, update: Tensor) -> Tensor:
        if self.kind is None:
            return update
        # in the update's precision, lest γ's float32 spread under autocast
        return features + (update if self.gamma is None else self.gamma.to(update.dtype) * update)

    def extra_repr(self) -> str:
        return repr(self.kind)
