"""The default data of many graphs: the inked pixels of scikit-learn's digits; no download."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch_geometric.data import Data

from attnkit.tasks.graphs.digits_graph import digit_labels
from attnkit.tasks.graphs.whole.data import GraphsDataModule

SIDE = 8  # pixels


class DigitGridsData(GraphsDataModule):
    """scikit-learn's 1,797 handwritten digits, each a graph of its inked pixels.

    A node is a pixel with ink, with 17 features: its ink from 0 to 1, its row and its column, each
    one-hot. Edges join it with those of its eight neighbours that have ink, in both directions.
    The graphs thus differ in size and shape. Source of the digits: UCI (Alpaydin and Kaynak, 1998),
    the part in scikit-learn.

    `target` chooses what is predicted of a graph: "classes", the digit; "labels", see
    `digit_labels`; "numbers", its total ink, and its width, the number of columns from the first
    to the last pixel with an ink of at least 0.5, both in pixels.

    The arguments are those of `GraphsDataModule`.
    """

    def load(self) -> Iterable[Data]:
        from sklearn.datasets import load_digits  # takes half a second, which other data saves

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
        return [
            Data(x=x.clone(), edge_index=edges.clone(), y=one)  # clones, as saving a view saves all
            for x, edges, one in zip(*_grids(ink), y, strict=True)
        ]


def _grids(ink: np.ndarray) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return features and edges of the graphs of images [images, rows, columns]."""
    image, rows, columns = ink.nonzero()
    nodes = np.bincount(image, minlength=len(ink))
    one_hot = np.eye(SIDE, dtype=np.float32)
    x = np.concatenate([ink[image, rows, columns, None], one_hot[rows], one_hot[columns]], axis=1)

    target = np.arange(len(image)) - np.repeat(
        nodes.cumsum() - nodes, nodes
    )  # number within its graph
    numbers = np.full((len(ink), SIDE + 2, SIDE + 2), -1)  # of nodes; −1: none, as at the border
    numbers[image, rows + 1, columns + 1] = target
    around = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
    source = np.stack([numbers[image, rows + 1 + d, columns + 1 + r] for d, r in around])
    _, to = is_there = (source >= 0).nonzero()
    order = image[to].argsort(kind="stable")
    edges = np.stack([source[is_there][order], target[to][order]])
    counts = np.bincount(image[to], minlength=len(ink))
    return (
        torch.from_numpy(x).split(nodes.tolist()),
        torch.from_numpy(edges.astype(np.int64)).split(counts.tolist(), dim=1),
    )
