"""Data module of a coloured digit among grey ones: only one place shows the class."""

from typing import Any

import torch
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.tasks.image_classification.composed import (
    COLOURS,
    DIGIT,
    Composed,
    ComposedDigits,
    Digits,
    cells_of,
    in_cells,
)

_CELLS = 4  # cells a side, each with at most one digit
_STROKE = 4  # side in pixels of a piece of a digit


class NeedleDigits(ComposedDigits):
    """One coloured digit, whose class is the label, among grey digits and strokes, 32 × 32 pixels.

    Each is in a random cell of 4 × 4, and the grey digits have random classes, so that only the
    8 × 8 pixels of the coloured digit show the class; they are the mask. A random map, or a
    Gaussian at the centre, has 1/16 of its mass there; the mask itself has all of it.

    Args:
        num_distractors: number of grey digits.
        num_strokes: number of pieces of grey strokes, 4 × 4 pixels; at most 15 with the digits.
        **options: arguments of `ComposedDigits`.
    """

    patch = DIGIT

    def __init__(self, *, num_distractors: int = 3, num_strokes: int = 4, **options: Any) -> None:
        super().__init__(**options)
        at_least(0, num_distractors=num_distractors, num_strokes=num_strokes)
        if num_distractors + num_strokes >= _CELLS**2:
            raise ValueError(
                f"num_distractors + num_strokes: expected at most {_CELLS**2 - 1}, got "
                f"{num_distractors} + {num_strokes}"
            )
        self.num_distractors, self.num_strokes = num_distractors, num_strokes

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        each = 1 + self.num_distractors + self.num_strokes
        classes = digits.integers(10, count, each)
        ink = digits.draw(classes)
        ink[:, 1 + self.num_distractors :] *= self._pieces(count, digits)
        tint = (0.5 + 0.5 * digits.uniform(count, each, 1)).float().repeat(1, 1, 3)
        tint[:, 0] = torch.tensor(COLOURS)[digits.integers(len(COLOURS), count)] / 255
        places = digits.distinct(_CELLS**2, count, each)
        cells = torch.zeros(count, _CELLS**2, 3, DIGIT, DIGIT)
        cells[torch.arange(count)[:, None], places] = tint[..., None, None] * ink[:, :, None]
        masks = cells_of(_CELLS, DIGIT) == places[:, :1, None, None]
        return Composed(in_cells(cells), classes[:, 0], masks, classes[:, :1])

    def _pieces(self, count: int, digits: Digits) -> Tensor:
        """Return masks of a random piece of each digit, bool [count, num_strokes, 8, 8]."""
        starts = digits.integers(DIGIT - _STROKE + 1, 2, count, self.num_strokes, 1)
        pixels = torch.arange(DIGIT)
        rows, columns = ((pixels >= starts) & (pixels < starts + _STROKE)).unbind(0)
        return rows[..., :, None] & columns[..., None, :]
