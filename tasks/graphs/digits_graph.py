"""The default graph: scikit-learn's digits and their nearest neighbours; needs no network."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from attnkit.core.arguments import at_least
from attnkit.tasks.graphs.data import GraphDataModule
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
