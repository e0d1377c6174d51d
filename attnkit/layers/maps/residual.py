"""Conversion of feature maps [batch, channels, height, width] to tokens, and residual updates."""

from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import choice

Maps = Annotated[Tensor, "batch channels height width"]
ResidualKind = Literal["gamma", "add"]


def check_features(features: Tensor, channels: int | None, name: str = "features") -> None:
    """Raise a ValueError unless `features` are maps with that many channels (None: any number)."""
    shape = list(features.shape)
    if len(shape) != 4 or 0 in shape[1:] or (channels is not None and shape[1] != channels):
        expected = "channels" if channels is None else str(channels)
        raise ValueError(
            f"{name}: expected [batch, {expected}, height, width] with at least one pixel, "
            f"got {shape}"
        )


def to_tokens(features: Tensor) -> Tensor:
    """Return the pixels as tokens [batch, height · width, channels], row by row."""
    return features.flatten(2).transpose(1, 2)


def to_features(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return tokens as a feature map; the inverse of `to_tokens`."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


class Residual(nn.Module):
    """The combination of a layer's update with its input x.

    kind: "gamma", x + γ · update with one learned number γ that starts at 0, so that the layer
        starts as the identity (DANet, Fu et al. 2019); "add", x + update; None, the update alone.
    """

    def __init__(self, kind: ResidualKind | None) -> None:
        super().__init__()
        choice((*get_args(ResidualKind), None), residual=kind)
        self.kind = kind
        self.gamma = nn.Parameter(torch.empty(1)) if kind == "gamma" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set γ to 0."""
        if self.gamma is not None:
            nn.init.zeros_(self.gamma)

    def forward(self, features: Tensor, update: Tensor) -> Tensor:
        if self.kind is None:
            return update
        # in the update's precision: under autocast a float32 γ would make the output float32
        return features + (update if self.gamma is None else self.gamma.to(update.dtype) * update)

    def extra_repr(self) -> str:
        return repr(self.kind)
