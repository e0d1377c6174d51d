"""Data module with a known shortcut: a coloured mark that may predict the class of a digit."""

from typing import Any, Literal

import torch
from torch import Tensor

from attnkit.core.arguments import choice, up_to_1
from attnkit.tasks.image_classification.composed import (
    COLOURS,
    DIGIT,
    Composed,
    ComposedDigits,
    Digits,
    as_uint8,
    cells_of,
)

SIDE = 16
MARK = 4  # side of the mark in pixels
_CELLS = SIDE // MARK


class PlantedShortcut(ComposedDigits):
    """A grey digit in the middle and a mark of 4 × 4 pixels at the border of 16 × 16 pixels.

    In training and validation the mark has the colour of the label's class with probability
    `strength`, and a random colour otherwise: at 1 a model needs only the mark, at 0 the mark is
    uninformative. In the test its colour is random, unless `test_mark` is "training", so that the
    accuracy shows whether the model uses the digit. `painted` swaps marks: if the answer of a model
    follows, it relies on them.

    The mask is the mark, with the class of its colour. A random map has 1/16 of its mass there, a
    Gaussian at the centre less.

    Args:
        strength: probability, from 0 to 1, that the mark has the colour of the class.
        place: place of the mark: "random" at the border, or the upper left "corner".
        test_mark: colour of the mark in the test: "random", or as in "training".
        **options: arguments of `ComposedDigits`.
    """

    patch = MARK

    def __init__(
        self,
        *,
        strength: float = 1.0,
        place: Literal["random", "corner"] = "random",
        test_mark: Literal["random", "training"] = "random",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        up_to_1(strength=strength)
        choice(("random", "corner"), place=place)
        choice(("random", "training"), test_mark=test_mark)
        self.strength, self.place, self.test_mark = strength, place, test_mark

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        labels = digits.integers(10, count)
        ink, others = digits.draw(labels), digits.integers(10, count)
        strength = self.strength if split != "test" or self.test_mark == "training" else 0.0
        marks = torch.where(digits.uniform(count) < strength, labels, others)
        border = torch.tensor([0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 14, 15])  # in 4 × 4 cells
        cells = border[digits.integers(len(border), count)]
        if self.place == "corner":
            cells = torch.zeros_like(cells)
        canvas = torch.zeros(count, 3, SIDE, SIDE)
        middle = (SIDE - DIGIT) // 2
        canvas[:, :, middle : middle + DIGIT, middle : middle + DIGIT] = ink[:, None]
        masks = cells_of(_CELLS, MARK) == cells[:, None, None]
        images = as_uint8(canvas)
        return Composed(painted(images, masks, marks), labels, masks[:, None], marks[:, None])


def painted(images: Tensor, masks: Tensor, marks: Tensor) -> Tensor:
    """Return images with marks in the colours of these classes.

    Swapping the mark is an intervention: a model whose answer follows relies on the mark.

    Args:
        images: uint8 [images, 3, height, width].
        masks: bool [images, height, width], the places of the marks.
        marks: int64 [images], the classes.
    """
    colours = torch.tensor(COLOURS, dtype=torch.uint8)[marks][:, :, None, None]
    return torch.where(masks[:, None], colours, images)
