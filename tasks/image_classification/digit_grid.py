"""Data module of grids of digits, in which the cell of each class is known."""

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
    """Grids of n × n digits of different classes, 8 × 8 pixels each: one class in each cell.

    The grid pointing game (Böhle et al., Convolutional dynamic alignment networks, 2021) shows
    grids to a classifier that was trained on single images. Here the classifier is trained on
    grids. Each grid occurs n² times, once with each of its classes as the label. The best answer is
    therefore the same probability for all of them, and the best accuracy is 1/n² (the top-5
    accuracy of a 2 × 2 grid can be 1). An answer is right if the n² likeliest classes are those of
    the grid.

    There is a mask for every cell, with its class. A random map has 1/n² of its mass in a cell, as
    has a Gaussian at the centre of a 2 × 2 grid; the mask itself has all of it.

    Args:
        cells: n, 2 or 3.
        num_train: number of pictures, n² for each grid; so are num_val and num_test.
        **options: arguments of `ComposedDigits`.
    """

    patch = DIGIT

    def __init__(self, *, cells: int = 2, num_train: int = 8000, **options: Any) -> None:
        super().__init__(num_train=num_train, **options)
        if cells not in (2, 3):
            raise ValueError(f"cells: expected 2 or 3 cells a side, got {cells}")
        self.cells = cells

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        each = self.cells**2
        classes = digits.distinct(10, -(-count // each), each)
        cells = digits.draw(classes)[:, :, None].expand(-1, -1, 3, -1, -1)
        masks = cells_of(self.cells, DIGIT) == torch.arange(each)[:, None, None]
        images, every = in_cells(cells), torch.arange(count) // each
        labels = classes.flatten()[:count]
        return Composed(images[every], labels, masks.expand(count, -1, -1, -1), classes[every])
