"""Loaders of data that is fetched by the batch; under several processes each reads its own part."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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
