"""The colours of maps: one scale for numbers from 0 on, one for signed numbers, with their ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import matplotlib
import numpy as np
from torch import Tensor

from attnkit.lightning.maps import overlay

SEQUENTIAL, DIVERGING = "inferno", "RdBu_r"
"""Matplotlib's names: even steps to the eye from dark to bright; blue, white at 0, red."""


class Scale(NamedTuple):
    """Which numbers have which colours; what lies beyond an end has that end's colour."""

    low: float
    high: float
    name: str = SEQUENTIAL

    def levels(self, values: Tensor | np.ndarray) -> np.ndarray:
        """Numbers as places on the palette, uint8 of the same shape."""
        numbers = as_numbers(values)
        shares = (numbers - self.low) / ((self.high - self.low) or 1.0)
        return np.round(255 * shares.clip(0, 1)).astype(np.uint8)

    @property
    def palette(self) -> np.ndarray:
        """Its 256 colours from the lowest to the highest, uint8 [256, 3]."""
        colours = matplotlib.colormaps[self.name](np.arange(256))[:, :3]
        return np.round(255 * colours).astype(np.uint8)


def scale_of(maps: Iterable[Tensor | np.ndarray], *, is_signed: bool = False) -> Scale:
    """The scale that maps share: from 0 to their largest number, or evenly about 0.

    Only maps on the same scale can be compared by eye: give all that a reader will compare.
    """
    sizes = (float(np.abs(as_numbers(one)).max(initial=0.0)) for one in maps)
    size = max(sizes, default=0.0) or 1.0
    return Scale(-size, size, DIVERGING) if is_signed else Scale(0.0, size)


def as_numbers(values: Tensor | np.ndarray) -> np.ndarray:
    """On the CPU, float64."""
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def overlay_scale(maps: Iterable[Tensor | np.ndarray], *, is_signed: bool = False) -> Scale:
    """As `scale_of`, for maps multiplied onto an image in light tones: 0 is white."""
    low, high, name = scale_of(maps, is_signed=is_signed)
    return Scale(low, high, name if is_signed else overlay.COLOURS)
