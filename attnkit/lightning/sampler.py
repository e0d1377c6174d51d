"""The order of training data: shuffled by the epoch, shared by processes, from any place on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler


class ResumableSampler(DistributedSampler):
    """torch's `DistributedSampler`, which can start in the middle of an epoch, once.

    `ExactResume` then leaves out the batches that were trained on by their numbers alone, instead
    of loading them again. Right for datasets whose items draw no random numbers.

    >>> sampler = ResumableSampler(dataset, num_replicas=1, rank=0, seed=seed)
    >>> loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    Attributes:
        start: how many of this process's samples the next iteration leaves out.
    """

    start = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        return islice(super().__iter__(), start, None)
