"""The part of a graph that can reach a node: what is asked many times is asked of it alone."""

from typing import Any

import torch
from torch import Tensor

from attnkit.core.masks.edges import Edges


def renumbered(edges: Tensor, index: int) -> tuple[Tensor, Tensor, int]:
    """The nodes that edges [2, edges] join, with `index`: their numbers [nodes], and the edges and
    `index` where these are numbered from 0."""
    ends = torch.cat([edges.flatten(), edges.new_tensor([index])])
    nodes, places = ends.unique(return_inverse=True)
    return nodes, places[:-1].view(2, -1), int(places[-1])


def of_nodes(given: Any, nodes: Tensor, edges: Tensor, num_nodes: int) -> Any:
    """An argument of a model for some nodes alone: the edges between them in the place of all, of
    tensors with a row for each node the rows; others as they are."""
    if isinstance(given, Edges):
        return Edges(edges, len(nodes))
    if not isinstance(given, Tensor) or not given.ndim or len(given) != num_nodes:
        return given
    if given.layout == torch.strided:
        return given[nodes]
    return given.to_dense()[nodes].to_sparse(layout=given.layout)
