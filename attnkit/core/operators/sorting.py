"""Sorting of edges by target and by source at once, by a counting sort that numba compiles."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.core.operators.modes import is_plain

LEAST_EDGES = 2**12  # with fewer, NumPy sorts faster than numba loads the kernel


class Sorted(NamedTuple):
    """Sorted edges, as the tensors of `Adjacency`, by the same names."""

    offsets: Tensor
    target: Tensor
    source: Tensor
    order: Tensor | None
    by_source: Tensor
    source_offsets: Tensor
    target_by_source: Tensor


def sort_edges(edge_index: Tensor, num_targets: int, num_sources: int) -> Sorted | None:
    """Sort edge_index [2, edges], sources in row 0, by target and by source; both sorts are stable.

    Returns None if torch has to sort: numba is missing or broken, the tensor is not a plain int32
    or int64 one on a CPU, there are too few edges to pay or too many for int32, or a node's index
    is out of range.
    """
    num_edges = edge_index.shape[1]
    if not is_plain(edge_index) or edge_index.dtype not in (torch.int32, torch.int64):
        return None
    fits = max(num_targets + num_sources, 2 * num_edges) < 2**31
    if num_edges < LEAST_EDGES or not fits or not _is_there():
        return None
    from attnkit.core.operators.sorting_kernels import counting_sort  # numba takes half a second

    def new(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    found = Sorted(
        offsets=new(num_targets + 1),
        target=new(num_edges),
        source=new(num_edges),
        order=new(num_edges, torch.int64),
        by_source=new(num_edges),
        source_offsets=new(num_sources + 1),
        target_by_source=new(num_edges),
    )
    given = edge_index.detach().contiguous().numpy()
    has_nodes, is_ordered = counting_sort()(
        given, *(tensor.numpy() for tensor in found if tensor is not None)
    )
    if not has_nodes:
        return None
    return found._replace(order=None) if is_ordered else found


@cache
def _is_there() -> bool:
    try:
        from attnkit.core.operators import sorting_kernels  # noqa: F401
    except ImportError:  # numba also raises it for a NumPy that it does not support
        return False
    return True
