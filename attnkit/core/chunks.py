"""The edges of nodes in chunks of bounded size, so that a hub does not keep one worker busy while
the others wait.

In a graph whose degrees follow a power law, one program for each node would take as long as its
largest node. Sorting nodes by degree would start that one first and still wait for it; chunks bound
what a program does, whatever the degrees. Only nodes of more than one chunk pay for it, by a second
step that puts their parts together in an order that never changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chunks", "SplitNodes", "chunks_of"]


class Chunks(NamedTuple):
    """Each chunk's node, its first edge, the edge after its last, all [chunks], and where its part
    goes: slot ≥ 0 for one of several chunks of a node, −1 for a node's only chunk.

    A node without edges has one chunk, without edges, which writes its zeros.
    """

    node: Tensor
    start: Tensor
    stop: Tensor
    slot: Tensor


class SplitNodes(NamedTuple):
    """The nodes of several chunks, [split], and the slots of each: from first to the one before
    last."""

    node: Tensor
    first: Tensor
    last: Tensor

    @property
    def num_slots(self) -> int:
        return int(self.last[-1]) if len(self.last) else 0


def chunks_of(offsets: Tensor, size: int) -> tuple[Chunks, SplitNodes]:
    """Chunks of at most `size` edges, where the edges of node i are those from offsets[i] to
    offsets[i + 1]; in the dtype of offsets [nodes + 1]."""
    dtype, num_nodes = offsets.dtype, len(offsets) - 1
    counts = ((offsets.diff() + (size - 1)) // size).clamp(min=1)
    node = torch.arange(num_nodes, dtype=dtype, device=offsets.device)
    node = node.repeat_interleave(counts)
    ends = counts.cumsum(0, dtype=dtype)
    index = torch.arange(len(node), dtype=dtype, device=offsets.device)
    place = index - (ends - counts).index_select(0, node)  # among the chunks of its node
    start = offsets.index_select(0, node) + place * size
    stop = torch.minimum(start + size, offsets[1:].index_select(0, node))

    is_split = counts > 1
    last = torch.where(is_split, counts, 0).cumsum(0, dtype=dtype)
    slot = (last - counts).index_select(0, node) + place
    slot = slot.masked_fill(~is_split.index_select(0, node), -1)
    split = is_split.nonzero().flatten().to(dtype)
    last = last.index_select(0, split)
    first = last - counts.index_select(0, split)
    return Chunks(node, start, stop, slot), SplitNodes(split, first, last)
