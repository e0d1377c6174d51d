"""Samplers that order data and share them between processes, and splits of data."""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, SequentialSampler


class ResumableSampler(DistributedSampler):
    """torch's `DistributedSampler` that can start in the middle of an epoch, once.

    `ExactResume` then skips the batches that were trained on by their numbers alone, without
    loading them again. It is meant for datasets whose items draw no random numbers.

    >>> sampler = ResumableSampler(dataset, num_replicas=1, rank=0, seed=seed)
    >>> loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    Attributes:
        start: number of this process's samples that the next iteration skips.
    """

    start = 0

    def order(self) -> Iterator[Any]:
        """Return the numbers of this process's samples in this epoch, from its start."""
        return super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        return islice(self.order(), start, None)


class EpochSampler(ResumableSampler):
    """A `ResumableSampler` of pairs (epoch, number), for items drawn anew in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        return ((self.epoch, number) for number in super().__iter__())


class PlacedSampler(ResumableSampler):
    """A `ResumableSampler` of triples (epoch, place, number), for items drawn at every place.

    The place is the position in the epoch's order over all processes, so that draws do not depend
    on the number of processes.
    """

    def __iter__(self) -> Iterator[Any]:
        places = count(self.rank + self.start * self.num_replicas, self.num_replicas)
        numbers = super().__iter__()
        return ((self.epoch, place, number) for place, number in zip(places, numbers, strict=False))


class BalancedSampler(PlacedSampler):
    """A `PlacedSampler` that gives every class the same share of an epoch.

    An epoch is as long as the data. The samples of a class that is smaller than its share are
    repeated, by numbers that differ by one at most; of a larger class, each epoch reads another
    part.

    Args:
        dataset: dataset whose `labels` are int64 [samples].
        *args, **options: arguments of torch's `DistributedSampler`.
    """

    def __init__(self, dataset: Dataset, *args: Any, **options: Any) -> None:
        super().__init__(dataset, *args, **options)
        labels: Tensor = dataset.labels  # type: ignore[attr-defined]
        order, counts = labels.argsort(stable=True), labels.unique(return_counts=True)[1]
        self.classes = order.split(counts.tolist())

    def order(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        share = -(-self.total_size // len(self.classes))
        rows = []
        for of_class in self.classes:
            rounds = range(-(-share // len(of_class)))
            drawn = [of_class[torch.randperm(len(of_class), generator=generator)] for _ in rounds]
            rows.append(torch.cat(drawn)[:share])
        numbers = torch.cat(rows)
        shuffled = numbers[torch.randperm(len(numbers), generator=generator)][: self.total_size]
        return iter(shuffled[self.rank :: self.num_replicas].tolist())


def in_one_order(sampler: type[DistributedSampler]) -> type[DistributedSampler]:
    """Return a kind of sampler whose every epoch equals the first, for overfitting.

    It is a `SequentialSampler`: with `overfit_batches`, Lightning replaces other samplers by such
    ones, which know neither epochs nor places.
    """
    fixed = {"set_epoch": lambda self, epoch: None, "__module__": __name__}
    return type(f"{sampler.__name__}InOneOrder", (sampler, SequentialSampler), fixed)


class UnpaddedSampler(DistributedSampler):
    """A sampler of every sample exactly once over all processes: rank r reads the r-th part.

    torch's own repeats samples until every process has the same number, which counts some twice in
    the metrics. Here the numbers may differ by one, so nothing may be synchronised per batch;
    metrics are at the end of an epoch, and predictions are joined in the order of the ranks.

    Args:
        dataset, num_replicas, rank: as in torch's class.
        mixed_by: seed of a random order, if only the first batches are read; None: in order.
    """

    def __init__(
        self, dataset: Dataset, num_replicas: int, rank: int, mixed_by: int | None = None
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False)
        count: int = len(dataset)  # type: ignore[arg-type]
        start, stop = (-(-count * r // num_replicas) for r in (rank, rank + 1))
        self.numbers: Sequence[int] = range(start, stop)
        if mixed_by is not None:
            generator = torch.Generator().manual_seed(mixed_by)
            self.numbers = torch.randperm(count, generator=generator)[start:stop].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def stratified_split(labels: Tensor, fractions: Sequence[float], seed: int) -> list[Tensor]:
    """Return the numbers of the rest, then of each part, with that fraction of every class.

    A part gets at least one sample of a class that has three or more, and nothing of a smaller
    class. The same seed gives the same split; parts are disjoint and in ascending order.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[] for _ in range(len(fractions) + 1)]
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        counts = [max(1, round(len(rows) * f)) if len(rows) >= 3 else 0 for f in fractions]
        while sum(counts) >= len(rows):
            counts[counts.index(max(counts))] -= 1
        pieces = rows.split([len(rows) - sum(counts), *counts])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [torch.cat(part).sort().values for part in parts]


def grouped_split(
    groups: Tensor, strata: Tensor, fractions: Sequence[float], seed: int
) -> list[Tensor]:
    """Return the numbers of the rest, then of each part, with about that fraction of every stratum;
    no group is in two parts.

    The groups go one by one, the largest first and equal ones in an order drawn by the seed, to the
    part that lacks most of what they hold. Every part gets a group if there are enough.

    Args:
        groups: int64 [samples], the group of each sample.
        strata: [samples, strata], what to share out evenly, such as classes, one-hot.
    """
    names, whose = groups.unique(return_inverse=True)
    held = torch.zeros(len(names), strata.shape[1], dtype=torch.float64)
    held.index_add_(0, whose, strata.double())
    held = held[:, held.sum(dim=0) > 0]
    shares = torch.tensor([1 - sum(fractions), *fractions], dtype=torch.float64)
    held = held / held.sum(dim=0)  # rare strata count as much as others
    have = torch.zeros(len(shares), held.shape[1], dtype=torch.float64)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    order = order[held[order].sum(dim=1).argsort(descending=True, stable=True)]
    part_of = torch.zeros(len(names), dtype=torch.int64)
    for group in order.tolist():
        one = held[group]
        part = int((one * (2 * have + one) / shares[:, None]).sum(dim=1).argmin())
        have[part] += one
        part_of[group] = part
    for part in range(len(shares)):
        if not (part_of == part).any():
            counts = part_of.bincount(minlength=len(shares))
            rich = [group for group in order.tolist() if counts[part_of[group]] > 1]
            part_of[rich[-1:]] = part
    return [(part_of[whose] == part).nonzero().flatten() for part in range(len(shares))]


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged: the `collate_fn` of datasets that are fetched by the batch."""
    return batch
