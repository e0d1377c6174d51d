"""A large graph in parts: sampled neighbours of seed nodes, or all nodes layer by layer."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.masks.edges import Edges
from attnkit.core.operators.sparse import chosen_rows, offsets, ranges
from attnkit.lightning.errors import UserError
from attnkit.models.graph_model import Hops
from attnkit.tasks.graphs.base import CARRIED
from attnkit.tasks.loaders import BatchItems

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


class NeighborBatches(BatchItems):
    """Data set of seed nodes, fetched by the batch with their sampled neighbours.

    It is made for a `DataLoader` with `collate_fn=as_it_is`, whose sampler gives the numbers of the
    seeds. A batch is a sub-graph in the format of PyG's `NeighborLoader`: `x`, `y`, `edge_index`,
    `n_id` (the nodes' numbers in the graph) and `batch_size`, the number of seeds, which are the
    first nodes; `num_sampled_nodes` of the seeds and of each hop, and `num_sampled_edges` of each
    hop; and `positions`, `edge_attr` and `edge_weight` if the graph has them.

    The draw depends only on `seed`, the nodes of the batch and, with an `EpochSampler`, the epoch.
    Neither the number of workers nor stopping and resuming a run changes it, and data that is not
    shuffled is evaluated on the same sub-graphs each time.

    >>> batches = NeighborBatches(data, data.train_mask.nonzero().flatten(), [10, 5])
    >>> loader = DataLoader(batches, 256, shuffle=True, collate_fn=as_it_is)

    Args:
        data: the graph: x [nodes, channels], dense or sparse CSR, y [nodes], edge_index [2, edges].
        seeds: int64 [seeds], the nodes that batches are made for.
        num_neighbors: see `sample_neighbors`.
        seed: seed of the sampling.
        neighbors: the in-neighbours of `data`, if already computed.
    """

    def __init__(
        self,
        data: Data,
        seeds: Tensor,
        num_neighbors: Sequence[int],
        seed: int = 0,
        neighbors: InNeighbors | None = None,
    ) -> None:
        self.data = data
        self.seeds = seeds
        self.num_neighbors = list(num_neighbors)
        self.seed = seed
        self.neighbors = neighbors or in_neighbors(data)

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitems__(self, numbers: Sequence[int | tuple[int, int]]) -> Data:
        pairs = torch.as_tensor([(0, n) if isinstance(n, int) else n for n in numbers])
        seeds = self.seeds[pairs[:, 1]]
        generator = generator_of(self.seed, pairs)
        sampled = sample_neighbors(self.neighbors, seeds, self.num_neighbors, generator)
        nodes, x = sampled.nodes, self.data.x
        return Data(
            x=chosen_rows(x, nodes).float(),
            y=self.data.y.index_select(0, nodes),
            edge_index=sampled.edge_index,
            n_id=nodes,
            batch_size=sampled.num_nodes[0],
            num_sampled_nodes=sampled.num_nodes,
            num_sampled_edges=sampled.num_edges,
            **({"positions": self.data.positions[nodes]} if "positions" in self.data else {}),
            **{name: self.data[name][sampled.edges] for name in CARRIED if name in self.data},
        )


def generator_of(seed: int, drawn: Tensor) -> torch.Generator:
    """Return a generator for a batch, by `seed` and an `EpochSampler`'s items, int64 [items, 2]."""
    key = np.random.SeedSequence([seed, zlib.crc32(drawn.numpy().tobytes())])
    return torch.Generator().manual_seed(int(key.generate_state(1)[0]))


def in_neighbors(data: Data) -> InNeighbors:
    """Return the in-neighbours of a graph, with the order of edges if they have attributes."""
    has_order = any(name in data for name in CARRIED)
    return InNeighbors.of(data.edge_index, data.num_nodes, with_order=has_order)


def pyg_neighbor_loader(
    data: Data, seeds: Tensor, num_neighbors: Sequence[int], **options: Any
) -> Any:
    """Return PyG's `NeighborLoader`, whose batches have the same format.

    Args:
        options: options of a `DataLoader`.

    Raises:
        UserError: pyg-lib, which samples for PyG, is not installed.
    """
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.typing import WITH_PYG_LIB

    if not WITH_PYG_LIB:
        raise UserError("data.sampler: pyg needs pyg-lib, which is not installed; use attnkit")
    return NeighborLoader(data, list(num_neighbors), input_nodes=seeds, **options)


EDGES = 2**18  # number of edges into a block of nodes


class Layers:
    """One batch of nodes whose logits are computed from all their neighbours, layer by layer.

    The batch is a `Data` with `n_id` (the nodes), `batch_size` (their number), `y`, and `whole`,
    the `NeighborBatches` that hold features and neighbours and are not moved to the device.

    Args:
        batches: the batches of a split's nodes.
        chosen: positions of this process's nodes in `batches.seeds`.
    """

    def __init__(self, batches: NeighborBatches, chosen: Iterable[int]) -> None:
        nodes = batches.seeds[list(chosen)]
        self.batch = Data(
            y=batches.data.y.index_select(0, nodes),
            n_id=nodes,
            batch_size=len(nodes),
            num_nodes=len(nodes),
            whole=batches,
        )

    def __iter__(self) -> Iterator[Data]:
        if self.batch.batch_size:
            yield self.batch

    def __len__(self) -> int:
        return int(self.batch.batch_size > 0)


def sub_graphs(batch: Data, size: int = 1024) -> Iterator[Data]:
    """Yield the batch itself, or sampled sub-graphs if it is computed layer by layer.

    Each sub-graph is sampled around `size` nodes of the batch.
    """
    if "whole" not in batch:
        yield batch
        return
    whole = batch.whole
    parts = NeighborBatches(
        whole.data, batch.n_id.cpu(), whole.num_neighbors, whole.seed, whole.neighbors
    )
    for numbers in torch.arange(len(parts)).split(size):
        yield parts.__getitems__(numbers.tolist()).to(batch.n_id.device)


@torch.no_grad()
def layerwise(
    hops: Hops,
    x: Tensor,
    neighbors: InNeighbors,
    nodes: Tensor,
    num_edges: int = EDGES,
    *,
    edge_attr: Tensor | None = None,
) -> Tensor:
    """Return logits of nodes that equal those computed on the whole graph at once.

    A layer is computed only for the nodes that the next one reads, in blocks of targets with about
    `num_edges` edges. Only the outputs of two layers, one block, and the rows of features of that
    block are in memory.

    Args:
        hops: the layers of a network in evaluation mode.
        x: [all nodes, channels] on the CPU, dense or sparse CSR.
        neighbors: the in-neighbours of all nodes.
        nodes: int64 [nodes], on the device to compute on; outputs of layers stay on the CPU.
        edge_attr: [all edges, channels] on the CPU, for a network that reads it; the
            `neighbors` then have the order of the edges.

    Returns:
        [nodes, classes], on the device.
    """
    device, nodes = nodes.device, nodes.cpu()
    needed = [torch.unique(nodes)]
    for _ in hops.each:
        needed.append(_with_sources(neighbors, needed[-1], num_edges))
    before: Tensor | None = None
    place = torch.empty(len(neighbors.offsets) - 1, dtype=torch.int32)
    for number, hop in enumerate(hops.each, 1):
        targets, after, filled = needed[len(hops.each) - number], None, 0
        for block in _blocks(neighbors, targets, num_edges):
            part = sample_neighbors(neighbors, block, [ALL])
            if before is None:
                given = hops.before(chosen_rows(x, part.nodes).float().to(device))
            else:
                given = before.index_select(0, place.index_select(0, part.nodes)).to(device)
            edges = Edges(part.edge_index.to(device), len(block), len(part.nodes))
            carried = () if edge_attr is None else (edge_attr[part.edges].to(device),)
            found = hop(given, edges, *carried)
            if number == len(hops.each):
                found = hops.after(found)
            if after is None:
                after = found.new_empty((len(targets), found.shape[1]), device="cpu")
            after[filled : filled + len(block)] = found
            filled += len(block)
        before = after
        place[targets] = torch.arange(len(targets), dtype=torch.int32)
    assert before is not None
    return before.index_select(0, place.index_select(0, nodes)).to(device)


def _with_sources(neighbors: InNeighbors, nodes: Tensor, num_edges: int) -> Tensor:
    """Return the nodes and the sources of all edges into them, sorted."""
    found = torch.zeros(len(neighbors.offsets) - 1, dtype=torch.bool)
    found[nodes] = True
    for block in _blocks(neighbors, nodes, num_edges):
        found[sample_neighbors(neighbors, block, [ALL]).nodes] = True
    return found.nonzero().flatten()


def _blocks(neighbors: InNeighbors, nodes: Tensor, num_edges: int) -> Iterator[Tensor]:
    """Split sorted nodes into blocks with about `num_edges` edges into them, and no more nodes."""
    degrees = neighbors.offsets[nodes + 1] - neighbors.offsets[nodes]
    number = (degrees + 1).cumsum(0).sub_(1).div_(num_edges, rounding_mode="floor")
    yield from nodes.split(number.unique_consecutive(return_counts=True)[1].tolist())
