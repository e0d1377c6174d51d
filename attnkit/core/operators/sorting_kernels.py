"""The counting sort of edges, compiled by numba."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit


def compiled(kernel: Callable[..., Any]) -> Any:
    """Return the kernel, compiled at its first call and cached in a file if possible."""
    try:
        return njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # no folder can be written to
        return njit(nogil=True)(kernel)


@cache
def counting_sort() -> Callable[..., Any]:
    return compiled(_sort)


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
