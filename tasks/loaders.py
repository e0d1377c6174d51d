"""Loaders of data that is fetched by the batch, of a number of samples or of tokens; under several
processes each reads its own part."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import (
    ResumableSampler,
    UnpaddedSampler,
    as_it_is,
    in_one_order,
)
from attnkit.lightning.resume.signals import outlast_signals


class SplitData(LightningDataModule, ABC):
    """A data module whose loaders are alike; a subclass says in `loader()` how one is made."""

    @abstractmethod
    def loader(self, split: str) -> Any:
        """The loader of "train", "val" or "test"."""

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return self.loader("train")

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return self.loader("val")

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return self.loader("test")


class BatchItems(Dataset):
    """Items that are fetched by the batch; a subclass says how many there are."""

    def __getitem__(self, number: Any) -> Any:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Any) -> Any:
        """The batch of the items with these numbers."""
        raise NotImplementedError


def make_loader(data: Any, items: Any, split: str, kind: str, **options: Any) -> DataLoader:
    """A loader of items whose `__getitems__` returns a batch; options as in `loader_options`."""
    return DataLoader(
        items, collate_fn=as_it_is, **loader_options(data, items, split, kind, **options)
    )


def loader_options(
    data: Any,
    items: Any,
    split: str,
    kind: str,
    *,
    shuffled: type[DistributedSampler] = ResumableSampler,
    num_workers: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` for a data module with `batch_size`, `num_workers` and
    `seed`.

    In training the order is drawn by the seed and the epoch, and items are repeated to make the
    parts of the processes equal. Otherwise each process has a part in one piece, and no item comes
    twice; if the trainer limits the batches of val or test, the few are of all the items, drawn by
    the seed, as files are mostly sorted by class. With `overfit_batches` the order of training is
    that of the first epoch, every time.

    Args:
        data: the data module.
        items: whatever has a length.
        split: which part of the data they are; "train" is shuffled.
        kind: what they are called in an error.
        shuffled: the sampler of training.
        num_workers: None: the data module's.
        options: further ones, returned as they are.

    Raises:
        UserError: there are fewer items than processes, and the data module does not allow that.
    """
    trainer = data.trainer
    rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
    if len(items) < world and not data.allow_zero_length_dataloader_with_multiple_devices:
        raise UserError(f"data: {len(items)} {split} {kind} are too few for {world} processes")
    seed = getattr(data, "seed", 0)
    workers = data.num_workers if num_workers is None else num_workers
    # Lightning leaves distributed samplers alone, and gives them the epoch.
    unpadded: Any = UnpaddedSampler
    if trainer and trainer.overfit_batches and split in ("train", "val"):
        shuffled, unpadded = in_one_order(shuffled), in_one_order(unpadded)
    sampler: DistributedSampler = (
        shuffled(items, world, rank, seed=seed)
        if split == "train"
        else unpadded(items, world, rank, seed if is_limited(trainer, split) else None)
    )
    return {
        "batch_size": data.batch_size,
        "sampler": sampler,
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "generator": torch.Generator().manual_seed(seed),
        "worker_init_fn": outlast_signals,
        **options,
    }


def is_limited(trainer: Any, split: str) -> bool:
    """Whether the trainer reads only a part of val or a test split."""
    if trainer is None or split == "predict":
        return False
    limit = trainer.limit_val_batches if split == "val" else trainer.limit_test_batches
    return not (isinstance(limit, float) and limit == 1.0)


def module_of(data: LightningDataModule) -> Any:
    """Return the module in a data module's trainer, or None."""
    return data.trainer.lightning_module if data.trainer is not None else None


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
