"""Feature maps [batch, channels, height, width] as tokens, and what a layer adds to them."""

from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import choice

Maps = Annotated[Tensor, "batch channels height width"]
ResidualKind = Literal["gamma", "add"]


def check_features(features: Tensor, channels: int | None, name: str = "features") -> None:
    """ValueError unless these are feature maps of so many channels; None: of any number."""
    shape = list(features.shape)
    if len(shape) != 4 or 0 in shape[1:] or (channels is not None and shape[1] != channels):
        expected = "channels" if channels is None else str(channels)
        raise ValueError(
            f"{name}: expected [batch, {expected}, height, width] with at least one pixel, "
            f"got {shape}"
        )


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
        choice((*get_args(ResidualKind), None), residual=kind)
        self.kind = kind
        self.gamma = nn.Parameter(torch.empty(1)) if kind == "gamma" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 0."""
        if self.gamma is not None:
            nn.init.zeros_(self.gamma)

    def forward(self, features: Tensor, update: Tensor) -> Tensor:
        if self.kind is None:
            return update
        # in the update's precision: under autocast a float32 γ would make the output float32
        return features + (update if self.gamma is None else self.gamma.to(update.dtype) * update)

    def extra_repr(self) -> str:
        return repr(self.kind)
