"""Mini-batches of a large graph: seed nodes and their sampled neighbours."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.operators.sparse import chosen_rows
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.checks import CARRIED
from attnkit.tasks.graphs.sampler import InNeighbors, sample_neighbors
from attnkit.tasks.loaders import BatchItems


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
