"""Neighbour sampling: a few in-neighbours per node and layer, drawn for all nodes at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.core.operators.sparse import offsets, ranges

ALL = -1  # as a number of neighbours: all of a node's


class InNeighbors(NamedTuple):
    """The edges of a graph by target (CSR): into node i come sources[offsets[i]:offsets[i + 1]].

    order: the number of each edge in the caller's order, if requested.
    """

    offsets: Tensor
    sources: Tensor
    order: Tensor | None = None

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int, *, with_order: bool = False) -> "InNeighbors":
        """Sort the edges of edge_index [2, edges], source in row 0, target in row 1, by target."""
        source, target = edge_index
        counts = torch.bincount(target, minlength=num_nodes)
        if num_nodes < 2**31:  # int32 takes half the memory
            source = source.int()
        order = target.argsort(stable=True)
        sorted_sources = source.index_select(0, order)
        return cls(offsets(counts), sorted_sources, order if with_order else None)


class Sampled(NamedTuple):
    """A sub-graph around seed nodes.

    Attributes:
        nodes: int64 [nodes], their numbers in the whole graph; the seeds first, each once, then
            the nodes that each hop reached.
        edge_index: int64 [2, edges], source in row 0, target in row 1, as positions in `nodes`.
        seeds: int64 [seeds], the position in `nodes` of every seed that was given.
        num_nodes: the number of seeds, then the number of new nodes of each hop.
        num_edges: the number of edges of each hop, the nearest to the seeds first.
        edges: int64 [edges], the number of each edge in the caller's order; None if `neighbors` has
            no order.
    """

    nodes: Tensor
    edge_index: Tensor
    seeds: Tensor
    num_nodes: list[int]
    num_edges: list[int]
    edges: Tensor | None = None


def sample_neighbors(
    neighbors: InNeighbors,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    generator: torch.Generator | None = None,
) -> Sampled:
    """Sample the sub-graph around seeds that `len(num_neighbors)` layers of message passing read.

    The first layer of sampling draws from the edges into the seeds, the next from those into the
    nodes that the first one added, and so on. At most that layer's number of edges into a node are
    kept, chosen uniformly without replacement; -1 keeps all, so that the seeds' outputs are exactly
    those on the whole graph. The time depends on the number of edges drawn, not on degrees or on
    the size of the graph.

    Source: GraphSAGE (Hamilton et al., 2017), which drew with replacement.

    Args:
        neighbors: the whole graph.
        seeds: int64 [seeds], nodes; repeats are sampled once.
        num_neighbors: for each layer, the nearest to the seeds first: 0 or more, or -1 for all.
        generator: generator of random numbers, on the CPU; None: torch's default.

    Raises:
        ValueError: a number of neighbours below -1.
    """
    if any(count < -1 for count in num_neighbors):
        raise ValueError(f"num_neighbors: expected -1 (all), 0 or more, got {list(num_neighbors)}")
    nodes, positions = seeds.unique(return_inverse=True)
    frontier, first, edges = nodes, 0, [seeds.new_empty((2, 0))]
    places = [seeds.new_empty(0)]
    sizes = [len(nodes)]
    for count in num_neighbors:
        chosen, rows = _edges_into(neighbors, frontier, count, generator)
        sources = neighbors.sources.index_select(0, chosen).long()
        places.append(chosen)
        reached, place = sources.unique(return_inverse=True)
        position = _positions(nodes, reached)
        new = (position < 0).nonzero().flatten()
        position[new] = len(nodes) + torch.arange(len(new))
        edges.append(torch.stack([position.index_select(0, place), first + rows]))
        frontier, first = reached.index_select(0, new), len(nodes)
        nodes = torch.cat([nodes, frontier])
        sizes.append(len(frontier))
    num_edges = [hop.shape[1] for hop in edges[1:]]
    order = neighbors.order
    kept = None if order is None else order.index_select(0, torch.cat(places))
    return Sampled(nodes, torch.cat(edges, dim=1), positions, sizes, num_edges, kept)


def _positions(nodes: Tensor, reached: Tensor) -> Tensor:
    """Return the position in `nodes` of each of the sorted `reached`, −1 if it is missing."""
    found = torch.full_like(reached, -1)
    if len(reached):
        place = torch.searchsorted(reached, nodes).clamp_(max=len(reached) - 1)
        there = (reached[place] == nodes).nonzero().flatten()
        found[place[there]] = there
    return found


def _edges_into(
    neighbors: InNeighbors, nodes: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return places [edges] in `neighbors` of edges into nodes, and the position of each target.

    A node gets all of its edges, or `count` of them if it has more; the position is that of the
    target in `nodes`.
    """
    starts = neighbors.offsets.index_select(0, nodes)
    degrees = neighbors.offsets.index_select(0, nodes + 1) - starts
    is_many = degrees > count if count >= 0 else torch.zeros_like(degrees, dtype=torch.bool)
    few, many = (~is_many).nonzero().flatten(), is_many.nonzero().flatten()
    whole = ranges(starts[few], degrees[few])
    drawn = starts[many, None] + _subsets(degrees[many], max(count, 0), generator)
    rows = [few.repeat_interleave(degrees[few]), many.repeat_interleave(drawn.shape[1])]
    return torch.cat([whole, drawn.flatten()]), torch.cat(rows)


def _subsets(sizes: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Return a uniform subset of 0 … n − 1 for each size n > count, [sizes, count].

    Floyd's algorithm, in all rows at once: its j-th number is drawn from 0 … n − count + j, and is
    that upper limit if it was drawn before (Bentley and Floyd, 1987).
    """
    chosen = sizes.new_empty((len(sizes), count))
    for j in range(count):
        limit = sizes - count + j
        draw = torch.rand(len(sizes), dtype=torch.float64, generator=generator)
        number = torch.minimum((draw * (limit + 1)).long(), limit)
        repeated = (chosen[:, :j] == number[:, None]).any(dim=1)
        chosen[:, j] = torch.where(repeated, limit, number)
    return chosen
