"""Grids of digits of different classes, where the evidence of each class is known."""

from typing import Any

import torch

from attnkit.tasks.image_classification.composed import (
    DIGIT,
    Composed,
    ComposedDigits,
    Digits,
    cells_of,
    in_cells,
)


class DigitGrid(ComposedDigits):
    """n × n digits of different classes, 8 × 8 pixels each: a class is to be seen in its cell.

    After the grid pointing game (Böhle et al., Convolutional dynamic alignment networks, 2021), in
    which a classifier of single images is shown grids of them, which it never saw. Here it is
    trained on grids: each comes n² times, with each of its classes as the label once, so that the
    best answer is the same probability for all of them, and the accuracy 1/n² at best (of the first
    five of a 2 × 2 grid 1). A grid is answered right where the n² likeliest classes are in it.

    Masks are of all cells, with their classes. A map at random has 1/n² of its mass in a cell; so
    has a Gaussian about the middle of 2 × 2; the mask itself has all.

    Args:
        cells: n, 2 or 3.
        num_train: pictures with a label, n² of each grid; num_val, num_test as well.
        **options: as of `ComposedDigits`.
    """

    patch = DIGIT

    def __init__(self, *, cells: int = 2, num_train: int = 8000, **options: Any) -> None:
        super().__init__(num_train=num_train, **options)
        if cells not in (2, 3):
            raise ValueError(f"cells: expected 2 or 3, a side, got {cells}")
        self.cells = cells

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        each = self.cells**2
        classes = digits.distinct(10, -(-count // each), each)
        cells = digits.draw(classes)[:, :, None].expand(-1, -1, 3, -1, -1)
        masks = cells_of(self.cells, DIGIT) == torch.arange(each)[:, None, None]
        images, every = in_cells(cells), torch.arange(count) // each
        labels = classes.flatten()[:count]
        return Composed(images[every], labels, masks.expand(count, -1, -1, -1), classes[every])
