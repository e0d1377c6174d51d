"""The colours of maps: one scale for numbers from 0 on, one for signed numbers, with their ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from torch import Tensor

SEQUENTIAL, DIVERGING, OVERLAY = "inferno", "RdBu_r", "OrRd"
"""Matplotlib's names: even steps to the eye from dark to bright; blue, white at 0, red; white to
dark red."""
_DARKEST = 0.68  # what black becomes: dark images stay bright, and light ones visible
_LEAST_PIXELS = 240  # so that places that do not divide the pixels have even sides


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
    def mappable(self) -> ScalarMappable:
        """What matplotlib makes a colour bar of."""
        return ScalarMappable(Normalize(self.low, self.high), self.name)

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
    return Scale(low, high, name if is_signed else OVERLAY)


def overlaid(picture: np.ndarray, values: np.ndarray, scale: Scale) -> np.ndarray:
    """The colours of a map times the image in light grey, [pixels, pixels, 3] in [0, 1].

    Nothing is interpolated: pixel (y, x) of an image [height, width] has the value of the place
    (y · rows // height, x · columns // width).

    Args:
        picture: [height, width, 3] in [0, 1].
        values: [rows, columns].
        scale: of `overlay_scale`.
    """
    larger = -(-_LEAST_PIXELS // min(picture.shape[:2]))
    grey = picture.mean(axis=-1, keepdims=True).repeat(larger, axis=0).repeat(larger, axis=1)
    rows, columns = (
        np.arange(pixels) * places // pixels
        for pixels, places in zip(grey.shape[:2], values.shape, strict=True)
    )
    colours = scale.mappable.to_rgba(values)[..., :3]
    return (_DARKEST + (1 - _DARKEST) * grey) * colours[rows[:, None], columns]
