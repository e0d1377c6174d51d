"""Random splits of a graph's nodes, and keys that identify nodes across versions of a graph."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import stratified_split
from attnkit.tasks.graphs.base import SPLITS, has_target


def planetoid_masks(
    labels: Tensor, num_train_per_class: int, num_val: int, num_test: int, seed: int
) -> dict[str, Tensor]:
    """Random train_mask, val_mask and test_mask by the protocol of Planetoid (Yang et al., 2016).

    `num_train_per_class` nodes of each class are for training, `num_val` of the others for
    validation and `num_test` for the test.

    Raises:
        UserError: a class or the graph has fewer nodes.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    rank = torch.empty_like(order)  # the rank of a node within its class
    for label in labels.unique().tolist():
        members = order[labels[order] == label]
        if len(members) < num_train_per_class:
            raise UserError(
                f"data.num_train_per_class: expected at most {len(members)}, the nodes of class "
                f"{label}, got {num_train_per_class}"
            )
        rank[members] = torch.arange(len(members))
    train = order[rank[order] < num_train_per_class]
    rest = order[rank[order] >= num_train_per_class]
    if num_val + num_test > len(rest):
        raise UserError(
            f"data.num_val, data.num_test: expected together at most {len(rest)}, the nodes that "
            f"are not for training, got {num_val} + {num_test}"
        )
    return masks(len(labels), train, rest[:num_val], rest[num_val : num_val + num_test])


def random_masks(labels: Tensor, fractions: Sequence[float], seed: int) -> dict[str, Tensor]:
    """Return random train_mask, val_mask and test_mask.

    The fractions are those of the labelled nodes of each class, or of all nodes with a known label
    or number.

    Args:
        labels: integers [nodes], or labels or numbers [nodes, outputs].
        fractions: fractions of val and test.
        seed: seed of the draw.
    """
    labelled = has_target(labels).nonzero().flatten()
    strata = labels[labelled] if labels.ndim == 1 else torch.zeros_like(labelled)
    split = stratified_split(strata, fractions, seed)
    return masks(len(labels), *(labelled[part] for part in split))


def masks(count: int, train: Tensor, val: Tensor, test: Tensor) -> dict[str, Tensor]:
    """Return train_mask, val_mask and test_mask, bool [count], of nodes given by number."""
    parts = zip(SPLITS, (train, val, test), strict=True)
    return {f"{name}_mask": index_to_mask(nodes, count) for name, nodes in parts}


def node_keys(graph: Data) -> Tensor:
    """Return a key of each node, int64 [nodes], of its number, label and features.

    Keys identify nodes after other nodes or edges were added or removed. If several nodes have
    equal features, such as all ones, nodes of another graph may have the same keys.
    """
    numbers = _mixed(torch.arange(graph.num_nodes))
    labels = graph.y if graph.y.ndim == 1 else _row_keys(graph.y)
    return _mixed(_mixed(numbers + labels) + _row_keys(graph.x))


def are_alike(x: Tensor) -> Tensor:
    """Return which nodes have the same features as another node, bool [nodes]."""
    _, kinds, counts = _row_keys(x).unique(return_inverse=True, return_counts=True)
    return counts[kinds] > 1


def _row_keys(x: Tensor) -> Tensor:
    """Return a key of each row, int64 [rows]: the sum of its values' bits times column factors."""
    factors = _mixed(torch.arange(1, x.shape[1] + 1))
    if x.layout != torch.strided:
        entries = x.to_sparse_coo().coalesce()
        rows, columns = entries.indices()
        values = _bits(entries.values()) * factors[columns]
        return torch.zeros(len(x), dtype=torch.int64).index_add_(0, rows, values)
    return torch.cat([(_bits(rows) * factors).sum(dim=1) for rows in x.split(4096)])


def _bits(values: Tensor) -> Tensor:
    return (values.float() + 0.0).view(torch.int32).long()  # −0 becomes 0


def _mixed(numbers: Tensor) -> Tensor:
    """Return a hash of each int64, also int64.

    It is the finalizer of splitmix64 (Steele et al., 2014), but with shifts that keep the sign.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)
