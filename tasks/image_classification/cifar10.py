"""CIFAR-10 as torchvision reads it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torchvision.datasets import CIFAR10

from attnkit.lightning.errors import UserError
from attnkit.lightning.files import cache_folder
from attnkit.tasks.image_classification.augment import Augment
from attnkit.tasks.image_classification.data import (
    AugmentArgument,
    ImageDataModule,
)
from attnkit.tasks.images.sets import ImageSet, MemoryImages


class CIFAR10Data(ImageDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 × 32 pixels, 10 classes.

    Without `root` the files are downloaded once (170 MB) into the user's cache folder. With `root`
    they are read from there (`root` holds `cifar-10-batches-py/`, torchvision's layout), nothing is
    downloaded, and `root` is not written to. Validation images are taken from train.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. The other
    arguments are those of `ImageDataModule`.

    Raises:
        ValueError: `root` is no folder.
        UserError: in `prepare_data`, if the files are neither there nor to be had.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        image_size: int | None = None,
        in_channels: int | None = None,
        batch_size: int = 128,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        seed: int = 0,
        augment: AugmentArgument = "default",
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            image_size=image_size,
            in_channels=in_channels,
            batch_size=batch_size,
            num_workers=num_workers,
            val_fraction=val_fraction,
            seed=seed,
            augment=augment,
            drop_last=drop_last,
        )
        self.root = None if root is None else Path(root).expanduser().absolute()
        if self.root is not None and not self.root.is_dir():
            raise ValueError(f"root: no such folder: {root}")
        if self.root is not None and self.root.name == CIFAR10.base_folder:
            self.root = self.root.parent

    def default_augment(self) -> nn.Module:
        return Augment(horizontal_flip=0.5, crop_padding=4, randaugment_magnitude=9)

    def prepare_data(self) -> None:
        if self.root is None and not (cache_folder() / CIFAR10.base_folder).is_dir():
            self._download()

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        root = self.root or cache_folder()
        sets: dict[str, ImageSet] = {}
        try:
            for split in ("train", "test"):
                dataset = CIFAR10(str(root), train=split == "train")
                images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
                sets[split] = MemoryImages(images, dataset.targets)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"data.root: {root} does not hold CIFAR-10 as torchvision reads it "
                f"(a complete folder {CIFAR10.base_folder})"
            ) from error
        return sets, list(dataset.classes)

    def _download(self) -> None:
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Made whole beside its place, then moved: another process never sees half of it.
            with tempfile.TemporaryDirectory(dir=folder) as part:
                CIFAR10(part, download=True)
                target = folder / CIFAR10.base_folder
                if not target.is_dir():
                    os.replace(Path(part) / CIFAR10.base_folder, target)
        except (RuntimeError, OSError) as error:  # URLError is an OSError
            raise UserError(
                f"data: CIFAR-10 cannot be downloaded to {folder}: {error}\n"
                f"data.root=FOLDER reads it from a folder that holds {CIFAR10.base_folder}"
            ) from error
