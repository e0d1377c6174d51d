"""A map lying on its image: the image in light tones, the map in colours from white on."""

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

COLOURS = "OrRd"
_DARKEST = 0.68  # what black becomes: dark images stay bright, and light ones visible
_LEAST_PIXELS = 240  # so that places that do not divide the pixels have even sides


def overlaid(picture: np.ndarray, values: np.ndarray, top: float) -> np.ndarray:
    """The colours of a map times the image in light grey, [pixels, pixels, 3] in [0, 1].

    Nothing is interpolated: pixel (y, x) of an image [height, width] has the value of the place
    (y · rows // height, x · columns // width).

    Args:
        picture: [height, width, 3] in [0, 1].
        values: [rows, columns], 0 is white.
        top: the number that has the darkest colour; what is above has it too.
    """
    larger = -(-_LEAST_PIXELS // min(picture.shape[:2]))
    grey = picture.mean(axis=-1, keepdims=True).repeat(larger, axis=0).repeat(larger, axis=1)
    rows, columns = (
        np.arange(pixels) * places // pixels
        for pixels, places in zip(grey.shape[:2], values.shape, strict=True)
    )
    colours = matplotlib.colormaps[COLOURS](Normalize(0, top)(values))[..., :3]
    return (_DARKEST + (1 - _DARKEST) * grey) * colours[rows[:, None], columns]


def scale(top: float) -> ScalarMappable:
    """What a colour bar is made of."""
    return ScalarMappable(Normalize(0, top), COLOURS)
