"""Data modules for image classification; users subclass `ImageDataModule`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import (
    ResumableSampler,
    UnpaddedSampler,
    as_it_is,
    stratified_split,
)
from attnkit.lightning.resume.signals import outlast_signals
from attnkit.tasks.image_classification.augment import Augment
from attnkit.tasks.images.decode import to_channels
from attnkit.tasks.images.sets import (
    FileImages,
    ImageSet,
    MemoryImages,
)
from attnkit.tasks.images.sizes import default_image_size, default_patch_size

AugmentArgument = nn.Module | Mapping[str, Any] | Literal["default"] | None


class ImageDataModule(LightningDataModule, ABC):
    """Labelled images in up to three splits; a subclass says in `load()` where they come from.

    Splits that `load()` does not give are taken from train, stratified by class. A batch is uint8
    images [batch, channels, image_size, image_size] and int64 labels [batch]; images are brought to
    `image_size` and `in_channels`, and in training augmented, after the transfer to the device.
    Under several processes each reads its own part: training images are repeated to make the parts
    equal, validation and test images never are, so that metrics are exact.

    Args:
        image_size: side in pixels; None: the `image_size` of the module in the trainer if it has
            one, else what fits the images.
        in_channels: 1 (grey) or 3 (RGB); None: as the module's, else as the training images.
        batch_size: images per step and process.
        num_workers: processes that load; None: none for images in memory, else one per core up
            to 8 and shared between the processes of this machine.
        val_fraction: share of the training images that becomes the missing validation split.
        test_fraction: the same for the test split.
        seed: of all that is random here: the splits, the order and the augmentation. The last two
            depend on the epoch or step and on the process, and on nothing else.
        augment: `Augment` or any module on uint8 batches; a mapping is what `Augment` takes; None
            for none; "default" for what suits these images.
        drop_last: leave out the last training batch of an epoch if it is smaller.

    Example:
        >>> class Cells(ImageDataModule):
        ...     def load(self):
        ...         images, labels = torch.load("cells.pt")  # uint8 [images, channels, side, side]
        ...         return {"train": MemoryImages(images, labels)}, ["healthy", "infected"]
    """

    def __init__(
        self,
        *,
        image_size: int | None = None,
        in_channels: int | None = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
        augment: AugmentArgument = "default",
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if image_size is not None and image_size < 2:
            raise ValueError(f"image_size: expected 2 or more pixels, got {image_size}")
        if in_channels not in (None, 1, 3):
            raise ValueError(f"in_channels: expected 1, 3 or None, got {in_channels}")
        if batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more, got {batch_size}")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers: expected 0 or more, got {num_workers}")
        for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 < value < 1:
                raise ValueError(f"{name}: expected a number between 0 and 1, got {value}")
        if val_fraction + test_fraction >= 1:
            raise ValueError(
                "val_fraction, test_fraction: expected a sum below 1, "
                f"got {val_fraction} + {test_fraction}"
            )
        if seed < 0:
            raise ValueError(f"seed: expected 0 or more, got {seed}")
        self.image_size = image_size
        self.in_channels = in_channels
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.seed = seed
        self.augment = self._make_augment(augment)
        self.drop_last = drop_last
        self.sets: dict[str, ImageSet] = {}
        self.class_names: list[str] = []

    @abstractmethod
    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        """The splits there are ("train" and maybe "val" and "test") and the class names."""

    def default_augment(self) -> nn.Module | None:
        """What `augment="default"` means for these images."""
        return None

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once; all stages need the training images' size, mean and deviation."""
        if self.sets:
            return
        self._follow_module()
        given, class_names = self.load()
        if len(class_names) < 2:
            raise UserError(f"data: expected at least two classes, got {class_names}")
        self.sets = self._with_missing_splits(dict(given))
        self.class_names = list(class_names)
        for split, images in self.sets.items():
            if not len(images):
                raise UserError(f"data: no images for {split}")
            if images.labels.min() < 0 or images.labels.max() >= len(class_names):
                raise UserError(f"data: {split} has labels outside 0 to {len(class_names) - 1}")
        train = self.sets["train"]
        self.in_channels = self.in_channels or train.channels
        self.image_size = self.image_size or default_image_size(train.size)
        check_fits_module(self)

    def describe(self) -> dict[str, Any]:
        """What a model and `ImageClassification` need to know; plain values, after `setup`."""
        if not self.sets or self.image_size is None or self.in_channels is None:
            raise RuntimeError("describe() comes after setup()")
        mean, std = self.sets["train"].mean_and_std()
        if len(mean) < self.in_channels:
            mean, std = mean * self.in_channels, std * self.in_channels
        elif len(mean) > self.in_channels:
            mean, std = self._grey_train().mean_and_std()
        return {
            "image_size": self.image_size,
            "patch_size": default_patch_size(self.image_size),
            "in_channels": self.in_channels,
            "num_classes": len(self.class_names),
            "class_names": self.class_names,
            "mean": mean,
            "std": std,
        }

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return self._loader("train")

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return self._loader("val")

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return self._loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, *rest = batch
        images = fit_images(images, self.image_size, self.in_channels)
        if self.augment is not None and self.trainer is not None and self.trainer.training:
            # Its own seed per step and process: what is drawn depends on nothing else, and the
            # model's random numbers do not depend on the augmentation.
            step = self.trainer.fit_loop.total_batch_idx + 1
            key = np.random.SeedSequence([self.seed, self.trainer.global_rank, step])
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int(key.generate_state(1)[0]))
                images = self.augment(images)
        return (images, *rest)

    def _follow_module(self) -> None:
        """What was not asked for is what the module in the trainer was made for."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        self.image_size = self.image_size or getattr(module, "image_size", None)
        self.in_channels = self.in_channels or getattr(module, "in_channels", None)

    def _make_augment(self, given: AugmentArgument) -> nn.Module | None:
        if given == "default":
            return self.default_augment()
        if isinstance(given, Mapping):
            return Augment(**given)
        if given is not None and not isinstance(given, nn.Module):
            raise TypeError(
                f'augment: expected a module, a mapping, "default" or None, got {given!r}'
            )
        return given

    def _with_missing_splits(self, sets: dict[str, ImageSet]) -> dict[str, ImageSet]:
        if "train" not in sets:
            raise UserError(f"data: no train split, only {', '.join(sets) or 'nothing'}")
        fractions = {"val": self.val_fraction, "test": self.test_fraction}
        missing = [split for split in fractions if split not in sets]
        train = sets["train"]
        parts = stratified_split(train.labels, [fractions[name] for name in missing], self.seed)
        for split, rows in zip(missing, parts[1:], strict=True):
            if not len(rows):
                raise UserError(
                    f"data: {len(train)} training images are too few to take a {split} split: "
                    "three of a class, at least"
                )
            sets[split] = train.select(rows)
        if missing:
            sets["train"] = train.select(parts[0])
        return {split: sets[split] for split in ("train", "val", "test")}

    def _grey_train(self) -> MemoryImages:
        train = self.sets["train"]
        parts = torch.arange(len(train)).split(256)
        return MemoryImages(
            torch.cat([to_channels(train.fetch(rows), 1) for rows in parts]), train.labels
        )

    def _loader(self, split: str) -> DataLoader:
        images = self.sets[split]
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        if len(images) < world:
            raise UserError(f"data: {len(images)} {split} images are too few for {world} processes")
        # Lightning leaves distributed samplers alone, and gives them the epoch.
        sampler: DistributedSampler = (
            ResumableSampler(images, world, rank, seed=self.seed)
            if split == "train"
            else UnpaddedSampler(images, world, rank)
        )
        drop_last = self.drop_last and split == "train"
        if drop_last and len(sampler) < self.batch_size:
            raise UserError(
                f"data.batch_size: {self.batch_size} is more than the {len(sampler)} training "
                "images of a process, and drop_last leaves out what is smaller"
            )
        workers = self._workers(images)
        on_gpu = trainer is not None and trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            images,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=workers,
            collate_fn=as_it_is,
            pin_memory=on_gpu,
            persistent_workers=workers > 0,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=outlast_signals,
        )

    def _workers(self, images: ImageSet) -> int:
        if self.num_workers is not None:
            return self.num_workers
        if not isinstance(images, FileImages):
            return 0
        local = self.trainer.num_devices if self.trainer else 1
        return max(1, min(8, (os.cpu_count() or 1) // local))


def fit_images(images: Tensor, size: int | None, channels: int | None) -> Tensor:
    """A uint8 batch at another side and number of channels; None or equal leaves it."""
    if channels is not None and images.shape[1] != channels:
        if images.shape[1] == 1:
            images = images.expand(-1, channels, -1, -1)
        else:
            images = to_channels(images, channels)
    if size is not None and images.shape[-1] != size:
        images = F.resize(images, [size, size], InterpolationMode.BICUBIC, antialias=True)
    return images


def check_fits_module(data: LightningDataModule) -> None:
    """UserError if the module in the trainer was made for another image_size or in_channels."""
    module = data.trainer.lightning_module if data.trainer is not None else None
    for name in ("image_size", "in_channels"):
        asked, made_for = getattr(data, name), getattr(module, name, None)
        if made_for is not None and asked != made_for:
            raise UserError(
                f"data.{name}: got {asked}, but the module was made for {made_for}; "
                "leave it out, and images are brought to that"
            )
