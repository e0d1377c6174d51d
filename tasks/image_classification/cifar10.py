"""Data module of CIFAR-10, which torchvision reads."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets import CIFAR10

from attnkit.core.arguments import existing
from attnkit.core.operators.files import cache_folder
from attnkit.lightning.errors import UserError
from attnkit.tasks.image_classification.augment import Augment, shipped_augment
from attnkit.tasks.image_classification.data import ImageDataModule
from attnkit.tasks.images.sets import ImageSet, MemoryImages


class CIFAR10Data(ImageDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 × 32 pixels, 10 classes.

    Without `root` the files are downloaded once (170 MB) into the user's cache folder. With `root`
    they are read from that folder, which holds `cifar-10-batches-py/` (torchvision's layout);
    nothing is downloaded, and `root` is not written to. Validation images are taken from train.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. The other
    arguments are those of `ImageDataModule`.

    Raises:
        ValueError: `root` is not a folder.
        UserError: the files are missing and cannot be downloaded.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        batch_size: int = 128,
        **options: Any,
    ) -> None:
        if "test_fraction" in options:
            raise TypeError("test_fraction: CIFAR-10 has its own test images")
        super().__init__(batch_size=batch_size, **options)
        self.root = None if root is None else existing("root", root, folder=True)
        if self.root is not None and self.root.name == CIFAR10.base_folder:
            self.root = self.root.parent

    def default_augment(self) -> Augment:
        return shipped_augment("cifar10")

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
            # The folder is completed elsewhere and then moved, so that no process sees a partial
            # one.
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
