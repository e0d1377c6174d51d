"""Computes a network on a whole graph in bounded memory, layer by layer in blocks of nodes."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.masks.edges import Edges
from attnkit.core.operators.sparse import chosen_rows
from attnkit.models.graph_model import Hops
from attnkit.tasks.graphs.neighbors import NeighborBatches
from attnkit.tasks.graphs.sampler import ALL, InNeighbors, sample_neighbors

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
