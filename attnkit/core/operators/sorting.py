"""Sorting of edges by target and by source at once, by a counting sort that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit.core.operators.cpu import is_plain

LEAST_EDGES = 2**12  # with fewer, NumPy sorts faster than numba loads the kernel


def sort_edges(
    edge_index: Tensor, num_targets: int, num_sources: int
) -> dict[str, Tensor | None] | None:
    """Sort edge_index [2, edges], sources in row 0, by target and by source; both sorts are stable.

    Returns the tensors of `Adjacency` by the same names; or None if torch has to sort: numba is
    missing or broken, the tensor is not a plain int32 or int64 one on a CPU, there are too few
    edges to pay or too many for int32, or a node's index is out of range.
    """
    num_edges = edge_index.shape[1]
    if not is_plain(edge_index) or edge_index.dtype not in (torch.int32, torch.int64):
        return None
    fits = max(num_targets + num_sources, 2 * num_edges) < 2**31
    if num_edges < LEAST_EDGES or not fits:
        return None
    sort = counting_sort()
    if sort is None:
        return None

    def new(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    sorted_edges = {
        "offsets": new(num_targets + 1),
        "target": new(num_edges),
        "source": new(num_edges),
        "order": new(num_edges, torch.int64),
        "by_source": new(num_edges),
        "source_offsets": new(num_sources + 1),
        "target_by_source": new(num_edges),
    }
    given = edge_index.detach().contiguous().numpy()
    has_nodes, is_ordered = sort(given, *(tensor.numpy() for tensor in sorted_edges.values()))
    if not has_nodes:
        return None
    return {**sorted_edges, "order": None} if is_ordered else {**sorted_edges}


@cache
def counting_sort() -> Callable[..., Any] | None:
    """Return the compiled sort; None if numba cannot be imported, also for a NumPy that it does not
    support."""
    try:
        return compiled(_sort)
    except ImportError:
        return None


def compiled(kernel: Callable[..., Any]) -> Any:
    """Return the kernel, compiled by numba at its first call and cached in a file if possible."""
    from numba import njit  # takes half a second

    try:
        return njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # no folder can be written to
        return njit(nogil=True)(kernel)


def _sort(
    edge_index, offsets, target, source, order, by_source, source_offsets, target_by_source
):  # fmt: skip
    """Sort the edges and write all arguments but edge_index. Return whether all nodes are in range,
    and whether the edges were already sorted by target. Stop at the first node out of range.

    Each number of edge_index is read only once: another process may write to it meanwhile, and the
    counts must agree with the places that are taken.
    """
    num_edges, num_targets, num_sources = len(target), len(offsets) - 1, len(source_offsets) - 1
    targets, sources = np.empty(num_edges, np.int32), np.empty(num_edges, np.int32)
    next_target = np.zeros(num_targets + 1, np.int32)
    next_source = np.zeros(num_sources + 1, np.int32)
    is_ordered, last = True, 0
    for edge in range(num_edges):
        j, i = edge_index[0, edge], edge_index[1, edge]
        if i < 0 or j < 0 or i >= num_targets or j >= num_sources:
            return False, False
        sources[edge], targets[edge] = j, i
        next_target[i + 1] += 1
        next_source[j + 1] += 1
        is_ordered &= last <= i
        last = i
    offsets[0] = source_offsets[0] = 0
    for i in range(1, num_targets + 1):
        next_target[i] += next_target[i - 1]
        offsets[i] = next_target[i]
    for j in range(1, num_sources + 1):
        next_source[j] += next_source[j - 1]
        source_offsets[j] = next_source[j]
    for edge in range(num_edges):
        i = targets[edge]
        place = next_target[i]
        next_target[i] = place + 1
        target[place] = i
        source[place] = sources[edge]
        order[place] = edge
    for place in range(num_edges):
        j = source[place]
        at = next_source[j]
        next_source[j] = at + 1
        by_source[at] = place
        target_by_source[at] = target[place]
    return True, is_ordered
