"""Batches of about as many nodes each, where graphs differ in size."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from attnkit.lightning.resume.sampler import ResumableSampler


class TokenSampler(ResumableSampler):
    """Lists of graphs with about as many nodes, drawn anew in every epoch; a list is a batch.

    The number of batches is the same in every epoch, ⌈all nodes / batch_nodes⌉, and as many for
    each process. The graphs are put in an order by the seed and the epoch and cut where equal
    shares of the nodes end; a batch has at most `batch_nodes` and as many as the largest graph has.
    No graph is left out or repeated. With `batch_size=1` of the loader `start` counts batches.

    Args:
        dataset: whose `sizes` are the nodes of each graph, int64 [graphs], and whose `batch_nodes`
            are those of a batch.
        *args, **options: those of torch's `DistributedSampler`.
    """

    def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
        super().__init__(dataset, *args, **options)
        self.sizes: Tensor = dataset.sizes
        world, count = self.num_replicas, len(self.sizes)
        wanted = -(-int(self.sizes.sum()) // dataset.batch_nodes)
        # each process has as many; fewer where there are not so many graphs
        self.num_batches = min(-(-wanted // world), count // world) * world
        self.num_samples = self.num_batches // world
        self.total_size = self.num_batches

    def order(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        numbers = torch.randperm(len(self.sizes), generator=generator)
        parts = cut(self.sizes[numbers], self.num_batches)
        batches = numbers.split(parts)
        return (batch.tolist() for batch in batches[self.rank :: self.num_replicas])


class TokenLists(DistributedSampler, SequentialSampler):
    """The graphs that another sampler gives, in its order, as lists of at most so many nodes.

    It is a `SequentialSampler`, as Lightning puts one of those, which gives single graphs, in the
    place of others where `overfit_batches` is set.

    Args:
        graphs: the other sampler, of a data set with `sizes` and `batch_nodes`, the most nodes of a
            list; a larger graph is a list of its own.
    """

    def __init__(self, graphs: DistributedSampler) -> None:
        dataset: Any = graphs.dataset
        super().__init__(dataset, graphs.num_replicas, graphs.rank, shuffle=False)
        sizes = dataset.sizes.tolist()
        self.lists: list[list[int]] = []
        nodes = batch_nodes = dataset.batch_nodes
        for number in graphs:
            if nodes + sizes[number] > batch_nodes:
                self.lists.append([])
                nodes = 0
            self.lists[-1].append(number)
            nodes += sizes[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def cut(sizes: Tensor, count: int) -> list[int]:
    """How many graphs of each of `count` parts, one after the other, so that their nodes are about
    equally many; at least one graph each.

    A graph is of the part in which its middle is.
    """
    ends = sizes.cumsum(0)
    limits = torch.arange(1, count) * (ends[-1].double() / count)
    bounds = torch.searchsorted(ends - sizes / 2, limits).tolist()
    parts, start = [], 0
    for place, bound in enumerate(bounds):
        stop = min(max(bound, start + 1), len(sizes) - (count - 1 - place))
        parts.append(stop - start)
        start = stop
    return [*parts, len(sizes) - start]
