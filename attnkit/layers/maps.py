"""Feature maps [batch, channels, height, width]: their shape, residual updates and combinations."""

from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from attnkit.core.arguments import at_least, choice

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


Mode = Literal["sequence", "sum", "max", "product", "gated_sum"]


class GatedSum(nn.Module):
    """A mixture of two feature maps, with a weight for each pixel and channel.

        y = g ⊙ a + (1 − g) ⊙ b,   g = σ(W [a, b] + c)

    Two maps `[batch, channels, height, width]` in, one out. W is a 1 × 1 convolution that starts at
    0, so that y starts as the mean. This is the gated multimodal unit of Arevalo et al. 2017 for
    maps, without its tanh layers before the mixture.

    Cost of an item: 2·channels²·height·width multiply-adds; 2·channels² + channels parameters.

    Args:
        channels: channels of each map.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        at_least(1, channels=channels)
        self.mix = nn.Conv2d(2 * channels, channels, 1)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)  # type: ignore[arg-type]

    def gate(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the share of the first map, `[batch, channels, height, width]`, in (0, 1)."""
        return self.mix(torch.cat([first, second], dim=1)).sigmoid()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return second + self.gate(first, second) * (first - second)


class Combined(nn.Module):
    """Two modules on feature maps, A and B, combined into one.

        sequence    y = B(A(x))
        sum         y = A(x) + B(x)
        max         y = max(A(x), B(x)), value by value
        product     y = A(x) ⊙ B(x)
        gated_sum   y = g ⊙ A(x) + (1 − g) ⊙ B(x), with the learned map g of `GatedSum`

    In a sum of two modules that each add their input, the input counts twice, as it does in DANet
    (Fu et al. 2019), which is

        Combined(position_attention, channel_attention, mode="sum", names=("position", "channel"))

    `CBAM` and `SCSE` are further examples. Combinations nest.

    Cost: that of the two modules, with "gated_sum" that of `GatedSum` too.

    Args:
        first, second: A and B. Except in a sequence, their outputs must have the same shape.
        mode: one of the modes above.
        channels: channels of the outputs, for "gated_sum" and for no other mode.
        names: names of the two children, used in the state dict and in captures.

    Raises:
        ValueError: another mode, "gated_sum" without channels or channels without it, equal names,
            or outputs of different shapes.
    """

    def __init__(
        self,
        first: nn.Module,
        second: nn.Module,
        *,
        mode: Mode = "sequence",
        channels: int | None = None,
        names: tuple[str, str] = ("first", "second"),
    ) -> None:
        super().__init__()
        choice(get_args(Mode), mode=mode)
        if (mode == "gated_sum") != (channels is not None):
            raise ValueError(
                f"channels: expected a number with mode='gated_sum' and None with any other, "
                f"got {channels} with {mode!r}"
            )
        if len(set(names)) != 2:
            raise ValueError(f"names: expected two that differ, got {names}")
        self.mode = mode
        self.names = names
        self.add_module(names[0], first)
        self.add_module(names[1], second)
        if channels is not None:
            self.fusion = GatedSum(channels)

    def forward(self, x: Maps) -> Annotated[Tensor, "batch _ _ _"]:
        first, second = getattr(self, self.names[0]), getattr(self, self.names[1])
        if self.mode == "sequence":
            return second(first(x))
        a, b = first(x), second(x)
        if a.shape != b.shape:
            raise ValueError(
                f"x: expected outputs of one shape, got {list(a.shape)} from {self.names[0]} and "
                f"{list(b.shape)} from {self.names[1]}"
            )
        if self.mode == "sum":
            return a + b
        if self.mode == "max":
            return torch.maximum(a, b)
        return a * b if self.mode == "product" else self.fusion(a, b)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}"
