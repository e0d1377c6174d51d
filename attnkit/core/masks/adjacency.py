"""Edges sorted by target and by source, as kernels read them; built once and reused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from attnkit.core.contexts import shared
from attnkit.core.masks.kept import Made, cached
from attnkit.core.operators.modes import is_plain


@dataclass(frozen=True, eq=False)
class Adjacency:
    """The edges of a graph in the order of their targets, and the way to the order of sources.

    offsets: the edges of target i are those from offsets[i] to offsets[i + 1], [targets + 1].
    target, source: of each edge, [edges].
    order: which of the caller's edges stands there, [edges]; None where it is the same order.
    num_sources: how many nodes there are to look at.

    Indices are int32 where they fit.
    """

    offsets: Tensor
    target: Tensor
    source: Tensor
    order: Tensor | None
    num_sources: int

    @classmethod
    def of(cls, edge_index: Tensor, num_targets: int, num_sources: int) -> Adjacency:
        """From edge_index [2, edges], sources in row 0, targets in row 1."""
        if torch.compiler.is_compiling():
            offsets, target, source, order = _sort_edges(edge_index, num_targets, num_sources)
            return cls(offsets, target, source, order, num_sources)
        from attnkit.core.operators.sorting import sort_edges  # for graphs alone

        found = sort_edges(edge_index, num_targets, num_sources)
        if found is not None:
            graph = cls(found.offsets, found.target, found.source, found.order, num_sources)
            for name in ("by_source", "source_offsets", "target_by_source"):
                vars(graph)[name] = getattr(found, name)
            return graph
        largest = max(num_targets + num_sources, 2 * edge_index.shape[1])
        dtype = torch.int32 if largest < 2**31 else torch.int64
        source, target = edge_index.to(dtype, copy=True)  # which nobody else writes to
        order = None
        if len(target) > 1 and not bool((target[1:] >= target[:-1]).all()):
            order = _ascending(target, num_targets)
            source, target = source[order], target[order]
        return cls(_offsets(target, num_targets), target, source, order, num_sources)

    def known(self, name: str) -> Tensor | None:
        """A cached property, None where it was not computed yet; also under torch.compile, which
        cannot compute one."""
        return vars(self).get(name)

    @property
    def num_targets(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        return len(self.target)

    @cached
    def by_source(self) -> Tensor:
        """The places of the edges in the order of their sources, [edges]."""
        return _ascending(self.source, self.num_sources).to(self.source.dtype)

    @cached
    def source_offsets(self) -> Tensor:
        """Where the edges of each source begin in that order, [sources + 1]."""
        return _offsets(self.source, self.num_sources)

    @cached
    def target_by_source(self) -> Tensor:
        """The targets in that order, [edges]."""
        return self.target.index_select(0, self.by_source)

    @cached
    def largest_degree(self) -> int:
        """How many edges the target with the most has."""
        return int(self.offsets.diff().max()) if self.num_targets else 0

    @cached
    def places(self) -> Tensor:
        """0 … edges − 1."""
        return torch.arange(self.num_edges, dtype=self.source.dtype, device=self.source.device)

    @cached
    def zeros(self) -> Tensor:
        """As many zeros."""
        return torch.zeros_like(self.source)

    @cached
    def pairs(self) -> Tensor:
        """Target and source of each edge, [2 · edges], where sources are counted after targets."""
        return torch.stack([self.target, self.source + self.num_targets], dim=1).flatten()

    @cached
    def pairs_by_source(self) -> Tensor:
        """The same in the order of sources."""
        return self.pairs.view(-1, 2).index_select(0, self.by_source).flatten()

    def pattern(self, values: Tensor) -> Tensor:
        """A sparse matrix [targets, sources] with these values, which it does not copy."""
        return _sparse(self.offsets, self.source, values, self.num_sources)

    def edge_pattern(self, values: Tensor) -> Tensor:
        """A sparse matrix [targets, edges]: an edge belongs to its target."""
        return _sparse(self.offsets, self.places, values, self.num_edges)

    def blocks(self, size: int, *, by_source: bool = False) -> list[tuple[int, int, int, int]]:
        """(first node, last node, first edge, last edge) of blocks of about `size` edges that keep
        the edges of a node together; the lasts do not belong to them."""
        return self._once(self._new_blocks, size, by_source)

    def _new_blocks(self, size: int, by_source: bool) -> list[tuple[int, int, int, int]]:
        offsets = self.source_offsets if by_source else self.offsets
        num_nodes = len(offsets) - 1
        wanted = torch.arange(size, max(size, self.num_edges), size, dtype=offsets.dtype)
        cuts = torch.searchsorted(offsets.cpu(), wanted)
        nodes = sorted({0, *cuts.tolist(), num_nodes})
        edges = offsets[torch.tensor(nodes, device=offsets.device)].tolist()
        bounds = zip(pairwise(nodes), pairwise(edges), strict=True)
        return [(*ends, *places) for ends, places in bounds]

    def chunks(self, size: int, *, by_source: bool = False) -> tuple[Chunks, SplitNodes, int]:
        """The edges of each target, or source, in chunks of at most `size`: the chunks, the nodes
        of several, and how many slots these have."""
        return self._once(self._new_chunks, size, by_source)

    def _new_chunks(self, size: int, by_source: bool) -> tuple[Chunks, SplitNodes, int]:
        chunks, split = split_hubs(self.source_offsets if by_source else self.offsets, size)
        num_slots = int(split.last[-1]) if len(split.last) else 0  # read once: the GPU waits
        return chunks, split, num_slots

    def copies(self, count: int) -> Adjacency:
        """`count` graphs side by side, none connected to another."""
        if count == 1:
            return self
        copies = self._once(self._new_copies, count)
        if "by_source" in vars(self) and "by_source" not in vars(copies):
            places = torch.arange(count, dtype=self.source.dtype, device=self.source.device)
            by_source = self.by_source + places[:, None] * self.num_edges
            vars(copies)["by_source"] = by_source.flatten()  # without sorting them
        return copies

    def first(self, num_targets: int) -> Adjacency:
        """The edges of the first targets; of edges whose order is the caller's."""
        assert self.order is None
        return self._once(self._new_first, num_targets)

    def _new_first(self, num_targets: int) -> Adjacency:
        end, offsets = int(self.offsets[num_targets]), self.offsets[: num_targets + 1]
        return Adjacency(offsets, self.target[:end], self.source[:end], None, self.num_sources)

    @cached
    def _kept(self) -> dict[tuple, Any]:
        return {}

    def _once(self, make: Callable[..., Made], *given: int) -> Made:
        """What `make` gives, made once for these numbers."""
        key = make.__name__, *given
        if key not in self._kept:
            self._kept[key] = make(*given)
        return self._kept[key]

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
    """offsets, target, source and order of `Adjacency.of`, as one operator of torch."""
    graph = Adjacency.of(edge_index, num_targets, num_sources)
    order = torch.arange(graph.num_edges, device=graph.offsets.device)
    if graph.order is not None:
        return graph.offsets, graph.target, graph.source, graph.order
    return graph.offsets, graph.target.clone(), graph.source.clone(), order  # of its own memory


@_sort_edges.register_fake
def _(edge_index, num_targets, num_sources):
    _, num_edges = edge_index.shape
    # a number that is not known yet is taken to be small
    is_small = guard_or_true(num_targets + num_sources < 2**31)
    dtype = torch.int32 if is_small and guard_or_true(2 * num_edges < 2**31) else torch.int64
    offsets = edge_index.new_empty(num_targets + 1, dtype=dtype)
    target, source = (edge_index.new_empty(num_edges, dtype=dtype) for _ in range(2))
    return offsets, target, source, edge_index.new_empty(num_edges, dtype=torch.int64)


def _ascending(nodes: Tensor, num_nodes: int) -> Tensor:
    """The places of the nodes in ascending order, those of one node as they stand."""
    if is_plain(nodes) and num_nodes <= 2**16:
        # NumPy sorts 16 bits by their digits: a small graph in a tenth of torch's time
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
    with warnings.catch_warnings():  # that sparse matrices may still change in torch
        warnings.simplefilter("ignore", UserWarning)
        yield


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


def split_hubs(offsets: Tensor, size: int) -> tuple[Chunks, SplitNodes]:
    """Chunks of at most `size` edges, where the edges of node i are those from offsets[i] to
    offsets[i + 1]; in the dtype of offsets [nodes + 1].

    In a graph whose degrees follow a power law, one program for each node would take as long as the
    largest node. Chunks bound what a program does. Only nodes of more than one chunk pay, by a
    second step that sums their chunks in a fixed order.
    """
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
