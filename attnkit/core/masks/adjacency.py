"""Edges sorted by target and by source, as kernels read them; built once and reused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from attnkit.core.contexts import shared
from attnkit.core.masks.kept import Made, cached
from attnkit.core.operators.cpu import is_plain


def _once(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return the method of `Adjacency` computed once for the same arguments."""
    defaults = getattr(make, "__kwdefaults__", None) or {}

    @wraps(make)
    def method(self: Adjacency, *given: int, **named: int) -> Made:
        key = make.__name__, given, *(defaults | named).items()
        if key not in self.kept:
            self.kept[key] = make(self, *given, **named)
        return self.kept[key]

    return method


@dataclass(frozen=True, eq=False)
class Adjacency:
    """The edges of a graph sorted by target, with the permutation that sorts them by source.

    offsets: target i has the edges offsets[i] … offsets[i + 1] − 1, [targets + 1].
    target, source: the two nodes of each edge, [edges].
    order: for each edge its index in the caller's order, [edges]; None if the orders are equal.
    num_sources: the number of source nodes.

    Indices are int32 where they fit.
    """

    offsets: Tensor
    target: Tensor
    source: Tensor
    order: Tensor | None
    num_sources: int

    @classmethod
    def of(cls, edge_index: Tensor, num_targets: int, num_sources: int) -> Adjacency:
        """Sort the edges of edge_index [2, edges], with sources in row 0 and targets in row 1."""
        if torch.compiler.is_compiling():
            offsets, target, source, order = _sort_edges(edge_index, num_targets, num_sources)
            return cls(offsets, target, source, order, num_sources)
        from attnkit.core.operators.sorting import sort_edges  # only graphs need it

        found = sort_edges(edge_index, num_targets, num_sources)
        if found is not None:
            graph = object.__new__(cls)  # with the cached properties of the order of sources
            vars(graph).update(found, num_sources=num_sources)
            return graph
        largest = max(num_targets + num_sources, 2 * edge_index.shape[1])
        dtype = torch.int32 if largest < 2**31 else torch.int64
        source, target = edge_index.to(dtype, copy=True)  # a copy that nobody else writes to
        order = None
        if len(target) > 1 and not bool((target[1:] >= target[:-1]).all()):
            order = _ascending(target, num_targets)
            source, target = source[order], target[order]
        return cls(_offsets(target, num_targets), target, source, order, num_sources)

    def known(self, name: str) -> Tensor | None:
        """Return a cached property, or None if it was not computed yet; torch.compile, which
        cannot compute one, can read it this way."""
        return vars(self).get(name)

    @property
    def num_targets(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return len(self.target)

    @cached
    def by_source(self) -> Tensor:
        """The permutation that sorts the edges by source, [edges]."""
        return _ascending(self.source, self.num_sources).to(self.source.dtype)

    @cached
    def source_offsets(self) -> Tensor:
        """Where the edges of each source begin in the order of sources, [sources + 1]."""
        return _offsets(self.source, self.num_sources)

    @cached
    def target_by_source(self) -> Tensor:
        """The targets of the edges in the order of sources, [edges]."""
        return self.target.index_select(0, self.by_source)

    @cached
    def largest_degree(self) -> int:
        """The largest number of edges that a target has."""
        return int(self.offsets.diff().max()) if self.num_targets else 0

    @cached
    def places(self) -> Tensor:
        """The numbers 0 … edges − 1."""
        return torch.arange(self.num_edges, dtype=self.source.dtype, device=self.source.device)

    @cached
    def zeros(self) -> Tensor:
        """Zeros, [edges]."""
        return torch.zeros_like(self.source)

    @cached
    def pairs(self) -> Tensor:
        """Target and source of each edge, [2 · edges]; sources are numbered after the targets."""
        return torch.stack([self.target, self.source + self.num_targets], dim=1).flatten()

    @cached
    def pairs_by_source(self) -> Tensor:
        """`pairs` in the order of sources."""
        return self.pairs.view(-1, 2).index_select(0, self.by_source).flatten()

    def pattern(self, values: Tensor) -> Tensor:
        """Return a sparse matrix [targets, sources] that shares the memory of these values."""
        return _sparse(self.offsets, self.source, values, self.num_sources)

    def edge_pattern(self, values: Tensor) -> Tensor:
        """Return a sparse matrix [targets, edges], the value of each edge in its target's row."""
        return _sparse(self.offsets, self.places, values, self.num_edges)

    @_once
    def blocks(self, size: int, *, by_source: bool = False) -> list[tuple[int, int, int, int]]:
        """Divide the edges into blocks of about `size` edges, never between the edges of a node:
        (first node, end of nodes, first edge, end of edges) of each, with exclusive ends."""
        offsets = self.source_offsets if by_source else self.offsets
        num_nodes = len(offsets) - 1
        wanted = torch.arange(size, max(size, self.num_edges), size, dtype=offsets.dtype)
        cuts = torch.searchsorted(offsets.cpu(), wanted)
        nodes = sorted({0, *cuts.tolist(), num_nodes})
        edges = offsets[torch.tensor(nodes, device=offsets.device)].tolist()
        bounds = zip(pairwise(nodes), pairwise(edges), strict=True)
        return [(*ends, *places) for ends, places in bounds]

    @_once
    def chunks(self, size: int, *, by_source: bool = False) -> tuple[Chunks, SplitNodes, int]:
        """Divide the edges of each target, or source, into chunks of at most `size` edges; return
        the chunks, the nodes that have several, and the number of slots of these nodes."""
        chunks, split = split_hubs(self.source_offsets if by_source else self.offsets, size)
        num_slots = int(split.last[-1]) if len(split.last) else 0  # read once: it waits for the GPU
        return chunks, split, num_slots

    def copies(self, count: int) -> Adjacency:
        """Return `count` copies of the graph as one graph without edges between the copies."""
        if count == 1:
            return self
        copies = self._new_copies(count)
        if "by_source" in vars(self) and "by_source" not in vars(copies):
            places = torch.arange(count, dtype=self.source.dtype, device=self.source.device)
            by_source = self.by_source + places[:, None] * self.num_edges
            vars(copies)["by_source"] = by_source.flatten()  # saves sorting the copies
        return copies

    @_once
    def first(self, num_targets: int) -> Adjacency:
        """Return the edges of the first `num_targets` targets; only without an `order`."""
        assert self.order is None
        end, offsets = int(self.offsets[num_targets]), self.offsets[: num_targets + 1]
        return Adjacency(offsets, self.target[:end], self.source[:end], None, self.num_sources)

    @cached
    def kept(self) -> dict[tuple, Any]:
        """What methods have returned, by their names and arguments."""
        return {}

    @_once
    def _new_copies(self, count: int) -> Adjacency:
        copy = torch.arange(count, device=self.target.device, dtype=self.target.dtype)[:, None]
        offsets = self.offsets[:-1] + copy * self.num_edges
        end = offsets.new_tensor([count * self.num_edges])
        return Adjacency(
            torch.cat([offsets.flatten(), end]),
            (self.target + copy * self.num_targets).flatten(),
            (self.source + copy * self.num_sources).flatten(),
            None,
            count * self.num_sources,
        )


@torch.library.custom_op("attnkit::sort_edges", mutates_args=())
def _sort_edges(
    edge_index: Tensor, num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return offsets, target, source and order of `Adjacency.of`, as one operator of torch."""
    graph = Adjacency.of(edge_index, num_targets, num_sources)
    if graph.order is not None:
        return graph.offsets, graph.target, graph.source, graph.order
    order = torch.arange(graph.num_edges, device=graph.offsets.device)
    # an operator's outputs must not share memory
    return graph.offsets, graph.target.clone(), graph.source.clone(), order


@_sort_edges.register_fake
def _(edge_index, num_targets, num_sources):
    _, num_edges = edge_index.shape
    # sizes that are not known yet are assumed to be small
    is_small = guard_or_true(num_targets + num_sources < 2**31)
    dtype = torch.int32 if is_small and guard_or_true(2 * num_edges < 2**31) else torch.int64
    offsets = edge_index.new_empty(num_targets + 1, dtype=dtype)
    target, source = (edge_index.new_empty(num_edges, dtype=dtype) for _ in range(2))
    return offsets, target, source, edge_index.new_empty(num_edges, dtype=torch.int64)


def _ascending(nodes: Tensor, num_nodes: int) -> Tensor:
    """Return the permutation that sorts the nodes; equal nodes stay in their order."""
    if is_plain(nodes) and num_nodes <= 2**16:
        # NumPy uses a radix sort for 16 bits: a tenth of torch's time for a small graph
        return torch.from_numpy(nodes.to(torch.uint16).numpy().argsort(kind="stable"))
    return nodes.sort(stable=True).indices


def _offsets(nodes: Tensor, num_nodes: int) -> Tensor:
    offsets = nodes.new_zeros(num_nodes + 1)
    offsets[1:] = torch.bincount(nodes, minlength=num_nodes).cumsum(0)
    return offsets


def _sparse(offsets: Tensor, columns: Tensor, values: Tensor, num_columns: int) -> Tensor:
    with shared("warnings of sparse matrices", _not_warned):
        return torch.sparse_csr_tensor(
            offsets, columns, values, (len(offsets) - 1, num_columns), check_invariants=False
        )


@contextmanager
def _not_warned() -> Iterator[None]:
    with warnings.catch_warnings():  # torch warns that its sparse matrices are in beta state
        warnings.simplefilter("ignore", UserWarning)
        yield


class Chunks(NamedTuple):
    """Chunks of the edges of nodes, each field [chunks]: node, first edge, end of edges, and slot.

    A chunk's result goes to slot ≥ 0 if its node has several chunks; the slot of a node's only
    chunk is −1. A node without edges has one chunk without edges, which writes its zeros.
    """

    node: Tensor
    start: Tensor
    stop: Tensor
    slot: Tensor


class SplitNodes(NamedTuple):
    """The nodes that have several chunks, [split]; node n has the slots first … last − 1."""

    node: Tensor
    first: Tensor
    last: Tensor


def split_hubs(offsets: Tensor, size: int) -> tuple[Chunks, SplitNodes]:
    """Divide the edges of nodes into chunks of at most `size` edges. Node i has the edges
    offsets[i] … offsets[i + 1] − 1, offsets being [nodes + 1]; the results have its dtype.

    In a graph whose degrees follow a power law, one program for each node would take as long as the
    largest node takes. Chunks bound the work of a program. Only nodes with several chunks cost
    more: a second step sums their chunks in a fixed order.
    """
    dtype, num_nodes = offsets.dtype, len(offsets) - 1
    counts = ((offsets.diff() + (size - 1)) // size).clamp(min=1)
    node = torch.arange(num_nodes, dtype=dtype, device=offsets.device)
    node = node.repeat_interleave(counts)
    ends = counts.cumsum(0, dtype=dtype)
    index = torch.arange(len(node), dtype=dtype, device=offsets.device)
    place = index - (ends - counts).index_select(0, node)  # number among the chunks of its node
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
