"""The default graphs: the inked pixels of scikit-learn's digits; needs no network."""

from collections.abc import Iterable

import numpy as np
import torch
from torch_geometric.data import Data

from attnkit.tasks.graphs.digits_graph import digit_labels
from attnkit.tasks.graphs.whole.data import GraphsDataModule

SIDE = 8  # pixels


class DigitGridsData(GraphsDataModule):
    """scikit-learn's 1,797 handwritten digits, each a graph of its inked pixels.

    A node is a pixel with ink, with 17 features: its ink from 0 to 1, its row and its column, each
    one-hot. Edges join it with those of its eight neighbours that have ink, in both directions. So
    the graphs differ in size and shape. Source of the digits: UCI (Alpaydin and Kaynak, 1998), the
    part scikit-learn ships.

    `target` says what is learned of a graph: "classes", the digit; "labels", see `digit_labels`;
    "numbers", its ink and the columns from the first to the last pixel of at least half the ink,
    both in pixels.

    The arguments are those of `GraphsDataModule`.
    """

    def load(self) -> Iterable[Data]:
        from sklearn.datasets import load_digits  # half a second that other data need not wait

        images, digits = load_digits(return_X_y=True)
        ink = images.reshape(-1, SIDE, SIDE).astype(np.float32) / 16
        y = torch.from_numpy(digits).long()[:, None]
        if self.target == "labels":
            y, self.class_names = digit_labels(digits)
        elif self.target == "numbers":
            self.class_names = ["ink", "width"]
            dark = (ink >= 0.5).any(axis=1)
            width = SIDE - dark.argmax(axis=1) - dark[:, ::-1].argmax(axis=1)
            numbers = np.stack([ink.sum(axis=(1, 2)), width], axis=1)
            y = torch.from_numpy(numbers.astype(np.float32))
        return [_grid(image, one) for image, one in zip(ink, y, strict=True)]


def _grid(ink: np.ndarray, y: torch.Tensor) -> Data:
    """The graph of one image [rows, columns]."""
    rows, columns = ink.nonzero()
    numbers = np.full((SIDE + 2, SIDE + 2), -1)  # of the nodes, with a border of none
    numbers[rows + 1, columns + 1] = np.arange(len(rows))
    edges = []
    for down, right in ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1)):
        source = numbers[rows + 1 + down, columns + 1 + right]
        is_there = source >= 0
        edges.append(np.stack([source[is_there], is_there.nonzero()[0]]))
    one_hot = np.eye(SIDE, dtype=np.float32)
    x = np.concatenate([ink[rows, columns, None], one_hot[rows], one_hot[columns]], axis=1)
    edge_index = torch.from_numpy(np.concatenate(edges, axis=1).astype(np.int64))
    return Data(x=torch.from_numpy(x), edge_index=edge_index, y=y)
