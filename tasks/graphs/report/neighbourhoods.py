"""Accuracy by the number of a node's neighbours, and by the share of them with its label."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

_DEGREES = 64  # groups of degrees: 0, 1, 2, 3–4, 5–8, …
_SHARES = 5  # groups of homophily, each a fifth
NONE = "none"
"""The group of nodes without a labelled neighbour."""


class GroupScore(NamedTuple):
    """Accuracy in a group of nodes.

    `by` is "degree" or "homophily"; `group` is a range ("3–4", "0.2–0.4"), or "none" for nodes
    without a labelled neighbour; `largest_class` is the share of the group's largest class, which
    is the accuracy of a model that always predicts it.
    """

    by: str
    group: str
    nodes: int
    right: int
    accuracy: float
    largest_class: float


def in_degrees(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the number of edges into each node without self-loops, int64 [nodes]."""
    source, target = edge_index
    return torch.bincount(target[source != target], minlength=num_nodes)


def label_homophily(edge_index: Tensor, y: Tensor) -> Tensor:
    """Return the share of each node's neighbours with its label, float [nodes].

    Neighbours are the sources of edges into a node, other than the node itself, that have a label
    (0 or more). A node without any gets NaN. Source: Pei et al., Geom-GCN, 2020; their mean over
    the nodes is PyG's `homophily(…, method="node")`.
    """
    source, target = edge_index
    counts = (source != target) & (y[source] >= 0)
    source, target = source[counts], target[counts]
    alike = torch.bincount(target[y[source] == y[target]], minlength=len(y))
    return alike / torch.bincount(target, minlength=len(y))


class NeighbourhoodScores(Metric):
    """Accuracy of nodes by degree and by homophily, exact over all batches and processes.

    Args:
        num_classes: number of classes.
    """

    full_state_update: bool = False

    labels: Tensor
    right: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        groups = _DEGREES + _SHARES + 1
        self.add_state("labels", torch.zeros(groups, num_classes, dtype=torch.long), "sum")
        self.add_state("right", torch.zeros(groups, dtype=torch.long), "sum")

    def update(self, right: Tensor, labels: Tensor, degrees: Tensor, homophily: Tensor) -> None:
        """Add nodes.

        Args:
            right: whether each is classified right, bool [nodes].
            labels: their classes, integers [nodes].
            degrees: result of `in_degrees`, [nodes].
            homophily: result of `label_homophily`, [nodes].
        """
        by_degree = torch.where(degrees > 1, degrees.double().log2().ceil().long() + 1, degrees)
        share = (homophily * _SHARES + 1e-6).nan_to_num(_SHARES).long()
        share = share.clamp(max=_SHARES - 1).where(~homophily.isnan(), _SHARES)
        for groups in (by_degree, _DEGREES + share):
            self.labels.index_put_((groups, labels), torch.ones_like(labels), accumulate=True)
            self.right.index_add_(0, groups, right.long())

    def compute(self) -> list[GroupScore]:
        """Return a row for each group that has nodes."""
        rows = []
        for (by, group), labels, right in zip(
            _groups(), self.labels.tolist(), self.right.tolist(), strict=True
        ):
            if nodes := sum(labels):
                rows.append(GroupScore(by, group, nodes, right, right / nodes, max(labels) / nodes))
        return rows


def _groups() -> Iterator[tuple[str, str]]:
    """Yield the criterion and the name of each group."""
    for number in range(_DEGREES):
        if number < 3:
            yield "degree", str(number)
        else:
            yield "degree", f"{2 ** (number - 2) + 1}–{2 ** (number - 1)}"
    for number in range(_SHARES):
        yield "homophily", f"{number / _SHARES:g}–{(number + 1) / _SHARES:g}"
    yield "homophily", NONE
