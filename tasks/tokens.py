"""Batches of about as many tokens each, where samples differ in size: the nodes of graphs, the
patches of images."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from attnkit.lightning.resume.sampler import ResumableSampler, as_it_is
from attnkit.tasks.loaders import loader_options


def token_loader(data: Any, items: Any, split: str, kind: str, **options: Any) -> DataLoader:
    """A loader whose batches are lists of samples that a sampler by tokens gives.

    Args:
        data, items, split, kind, options: as in `loader_options`; `items` have `sizes` and
            `batch_tokens`, as in `TokenSampler`, which is `shuffled` where no other is given.
    """
    options = {"shuffled": TokenSampler, **options, "batch_size": 1}
    made = loader_options(data, items, split, kind, **options)
    if split != "train":
        made["sampler"] = TokenLists(made["sampler"])
    return DataLoader(items, collate_fn=as_it_is, **made)


class TokenSampler(ResumableSampler):
    """Lists of samples with about as many tokens, drawn anew in every epoch; a list is a batch.

    The number of batches is the same in every epoch, ⌈all tokens / batch_tokens⌉, and as many for
    each process. The samples are put in an order by the seed and the epoch and cut where equal
    shares of the tokens end; a batch has at most `batch_tokens` and as many as the largest sample
    has. None is left out or repeated. With `batch_size=1` of the loader `start` counts batches.

    Args:
        dataset: whose `sizes` are the tokens of each sample, int64 [samples], and whose
            `batch_tokens` are those of a batch.
        *args, **options: those of torch's `DistributedSampler`.
    """

    def __init__(self, dataset: Any, *args: Any, **options: Any) -> None:
        super().__init__(dataset, *args, **options)
        self.sizes: Tensor = dataset.sizes
        world, count = self.num_replicas, len(self.sizes)
        wanted = -(-int(self.sizes.sum()) // dataset.batch_tokens)
        # each process has as many; fewer where there are not so many samples
        self.num_batches = min(-(-wanted // world), count // world) * world
        self.num_samples = self.num_batches // world
        self.total_size = self.num_batches

    def order(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        numbers = torch.randperm(len(self.sizes), generator=generator)
        parts = cut(self.sizes[numbers], self.num_batches)
        batches = numbers.split(parts)
        return (batch.tolist() for batch in batches[self.rank :: self.num_replicas])


class EpochTokenSampler(TokenSampler):
    """A `TokenSampler` of lists of pairs (epoch, number), for what is drawn anew in every epoch."""

    def order(self) -> Iterator[Any]:
        return ([(self.epoch, number) for number in batch] for batch in super().order())


class TokenLists(DistributedSampler, SequentialSampler):
    """The samples that another sampler gives, in its order, as lists of at most so many tokens.

    It is a `SequentialSampler`, as Lightning puts one of those, which gives single samples, in the
    place of others where `overfit_batches` is set.

    Args:
        samples: the other sampler, of a data set with `sizes` and `batch_tokens`, the most tokens
            of a list; a larger sample is a list of its own.
    """

    def __init__(self, samples: DistributedSampler) -> None:
        dataset: Any = samples.dataset
        super().__init__(dataset, samples.num_replicas, samples.rank, shuffle=False)
        sizes = dataset.sizes.tolist()
        self.lists: list[list[int]] = []
        tokens = batch_tokens = dataset.batch_tokens
        for number in samples:
            if tokens + sizes[number] > batch_tokens:
                self.lists.append([])
                tokens = 0
            self.lists[-1].append(number)
            tokens += sizes[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def cut(sizes: Tensor, count: int) -> list[int]:
    """Divide samples, in their order, into `count` parts with about equally many tokens; return the
    number of samples of each part, at least one.

    A sample belongs to the part in which its middle is.
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
