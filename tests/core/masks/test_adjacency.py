"""Chunks hold every edge once, and parts of a node have the slots that are put together."""

import sys

import pytest
import torch

from attnkit import Edges
from attnkit.core.masks.adjacency import Adjacency, split_hubs
from attnkit.core.operators import sorting

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


def orders(graph):
    names = ("offsets", "target", "source", "order", "by_source", "source_offsets")
    return {name: getattr(graph, name) for name in (*names, "target_by_source")}


def unsorted(targets, sources):
    return torch.stack([torch.randint(sources, (997,)), torch.randint(targets, (997,))])


def in_order(edge_index):
    return edge_index[:, edge_index[1].argsort(stable=True)]


EDGES = {
    "some": lambda targets, sources: unsorted(targets, sources),
    "in order": lambda targets, sources: in_order(unsorted(targets, sources)),
    "int32": lambda targets, sources: unsorted(targets, sources).int(),
    "transposed": lambda targets, sources: unsorted(targets, sources).T.contiguous().T,
    "a part": lambda targets, sources: unsorted(targets, sources)[:, ::3],
    "one": lambda targets, sources: unsorted(targets, sources)[:, :1],
    "none": lambda targets, sources: unsorted(targets, sources)[:, :0],
}


@pytest.mark.parametrize("sizes", [(101, 31), (31, 101), (70_001, 7), (7, 70_001), (1, 1)])
@pytest.mark.parametrize("name", EDGES)
def test_the_counting_sort_gives_the_same_bits(name, sizes, monkeypatch):
    pytest.importorskip("numba")
    torch.manual_seed(0)
    edge_index = EDGES[name](*sizes)
    expected = orders(Adjacency.of(edge_index, *sizes))
    monkeypatch.setattr(sorting, "LEAST_EDGES", 0)
    assert sorting.sort_edges(edge_index, *sizes) is not None
    graph = Adjacency.of(edge_index, *sizes)
    for key, tensor in orders(graph).items():
        wanted = expected[key]
        assert (tensor is None) == (wanted is None), key
        if tensor is not None:
            assert tensor.dtype == wanted.dtype, key
            assert torch.equal(tensor, wanted), key


@pytest.mark.parametrize("node", [-1, 11, 2**40])
def test_the_counting_sort_reads_no_node_that_is_not_there(node, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(sorting, "LEAST_EDGES", 0)
    edges = torch.randint(11, (2, 31))
    assert sorting.sort_edges(edges, 11, 11) is not None
    for row in (0, 1):
        wrong = edges.clone()
        wrong[row, 5] = node
        assert sorting.sort_edges(wrong, 11, 11) is None


def test_a_numba_that_cannot_be_imported_stops_nothing(monkeypatch):
    """As one that does not go together with NumPy."""
    edge_index = torch.randint(101, (2, 2 * sorting.LEAST_EDGES))
    expected = orders(Adjacency.of(edge_index, 101, 101))
    monkeypatch.setattr(sorting, "counting_sort", sorting.counting_sort.__wrapped__)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert sorting.sort_edges(edge_index, 101, 101) is None
    for key, tensor in orders(Adjacency.of(edge_index, 101, 101)).items():
        assert torch.equal(tensor, expected[key]), key


def test_what_torch_sorts(monkeypatch):
    assert sorting.sort_edges(torch.zeros(2, 31, dtype=torch.long), 3, 3) is None  # too few
    monkeypatch.setattr(sorting, "LEAST_EDGES", 0)
    edges = torch.zeros(2, 31, dtype=torch.long)
    assert sorting.sort_edges(edges, 2**31, 1) is None
    assert sorting.sort_edges(edges.short(), 3, 3) is None
    assert sorting.sort_edges(edges.to("meta"), 3, 3) is None
    monkeypatch.setattr(sorting, "counting_sort", lambda: None)
    assert sorting.sort_edges(edges, 3, 3) is None
    assert Adjacency.of(edges, 3, 3).num_edges == 31
