"""scikit-learn's digits as one graph of images, or as many graphs of pixels; no download."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from attnkit.core.arguments import at_least
from attnkit.tasks.graphs.data import GraphDataModule
from attnkit.tasks.graphs.many_data import GraphsDataModule
from attnkit.tasks.graphs.splits import planetoid_masks


class DigitsGraphData(GraphDataModule):
    """scikit-learn's 1,797 handwritten digits as nodes, each joined to its nearest neighbours.

    An edge joins two digits if one is among the k nearest of the other, by Euclidean distance of
    the 8 × 8 pixels; the features are the pixels, from 0 to 1. The split follows Planetoid's
    protocol (Yang et al., 2016), drawn by `seed`, with few labelled nodes of each class. Source of
    the digits: UCI (Alpaydin and Kaynak, 1998), the part that scikit-learn ships.

    With `target="labels"`, the targets are whether a digit is odd, is 5 or more and has a loop (see
    `digit_labels`). With "numbers", the features are the upper half of the image only, and the
    targets are the ink of the lower half, left and right, in pixels. The features of a node do not
    contain it, but the graph shows which digits the node resembles.

    Args:
        k: number of neighbours of a digit, not counting itself.
        num_train_per_class: labelled nodes of each class to train on.
        num_val: nodes to validate on.
        num_test: nodes to test on.

    The other arguments are those of `GraphDataModule`.
    """

    def __init__(
        self,
        *,
        k: int = 7,
        num_train_per_class: int = 20,
        num_val: int = 500,
        num_test: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(
            1, k=k, num_train_per_class=num_train_per_class, num_val=num_val, num_test=num_test
        )
        self.k = k
        self.num_train_per_class = num_train_per_class
        self.num_val = num_val
        self.num_test = num_test

    def load(self) -> Data:
        from sklearn.datasets import load_digits  # imported here, since it takes half a second
        from sklearn.neighbors import kneighbors_graph

        pixels, digits = load_digits(return_X_y=True)
        if self.k >= len(pixels):
            raise ValueError(f"k: expected at most {len(pixels) - 1}, got {self.k}")
        nodes, neighbors = kneighbors_graph(pixels, self.k).nonzero()
        edge_index = torch.from_numpy(np.stack([neighbors, nodes]).astype(np.int64))
        labels = torch.from_numpy(digits).long()
        x = torch.from_numpy(pixels / 16).float()
        y = labels
        if self.target == "labels":
            y, self.class_names = digit_labels(digits)
        elif self.target == "numbers":
            below = x[:, 32:].view(-1, 4, 2, 4)  # rows, halves, columns
            x, y = x[:, :32], below.sum(dim=(1, 3))
            self.class_names = ["lower_left", "lower_right"]
        return Data(
            x=x,
            y=y,
            edge_index=to_undirected(edge_index, num_nodes=len(labels)),
            **planetoid_masks(
                labels, self.num_train_per_class, self.num_val, self.num_test, self.seed
            ),
        )


def digit_labels(digits: np.ndarray) -> tuple[Tensor, list[str]]:
    """Return whether digits are odd, are 5 or more and have a loop (0, 6, 8, 9).

    Returns:
        float32 [digits, 3], and the names of these labels.
    """
    labels = np.stack([digits % 2, digits >= 5, np.isin(digits, (0, 6, 8, 9))], axis=1)
    return torch.from_numpy(labels.astype(np.float32)), ["odd", "large", "loop"]


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
