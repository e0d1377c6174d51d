"""Chunks hold every edge once, and parts of a node have the slots that are put together."""

import pytest
import torch

from attnkit import Edges
from attnkit.core.masks.adjacency import split_hubs

DEGREES = {
    "mixed": [3, 0, 1, 17, 4, 5, 0, 8],
    "whole": [1, 2, 0],
    "one hub": [0, 0, 101],
    "no edges": [0, 0],
    "no nodes": [],
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", list(DEGREES))
def test_every_edge_is_in_one_chunk(name, dtype):
    degrees, size = DEGREES[name], 4
    offsets = torch.tensor([0, *degrees]).cumsum(0).to(dtype)
    chunks, split = split_hubs(offsets, size)
    assert {tensor.dtype for tensor in (*chunks, *split)} == {dtype}
    rows = list(zip(*(tensor.tolist() for tensor in chunks), strict=True))
    held = [(node, edge) for node, start, stop, _ in rows for edge in range(start, stop)]
    owner = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees, dtype=torch.long))
    assert held == list(zip(owner.tolist(), range(sum(degrees)), strict=True))
    assert all(stop - start <= size for _, start, stop, _ in rows)
    assert {node for node, *_ in rows} == set(range(len(degrees)))

    slots = [(slot, node) for node, _, _, slot in rows if slot >= 0]
    assert [slot for slot, _ in slots] == list(range(int(split.last[-1]) if len(split.last) else 0))
    owners = dict(slots)
    assert split.node.tolist() == [i for i, degree in enumerate(degrees) if degree > size]
    for node, first, last in zip(*(tensor.tolist() for tensor in split), strict=True):
        assert {owners[slot] for slot in range(first, last)} == {node}
        assert last - first == -(-degrees[node] // size)


def test_they_are_kept():
    edges = Edges(torch.tensor([[0, 1, 1, 1], [0, 0, 0, 2]]), 3)
    by_target, by_source = (edges.adjacency.chunks(2, by_source=each) for each in (False, True))
    assert edges.adjacency.chunks(2) is by_target
    assert by_target[0].node.tolist() == [0, 0, 1, 2]
    assert by_source[0].node.tolist() == [0, 1, 1, 2]
    assert by_source[1].node.tolist() == [1]
