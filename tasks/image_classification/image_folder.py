"""Images in folders, one folder per class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnkit.lightning.arguments import at_least, existing
from attnkit.lightning.errors import UserError
from attnkit.tasks.image_classification.augment import Augment, shipped_augment
from attnkit.tasks.image_classification.data import ImageDataModule
from attnkit.tasks.images.folder import find_splits
from attnkit.tasks.images.scan import fit_in_memory, median_side, read_images
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.images.sizes import default_image_size


class ImageFolderData(ImageDataModule):
    """Images under `root`: `train/`, and if given `val/` and `test/`, with a folder per class.

    `root` may also hold the class folders themselves. Images may have any size and mode: the centre
    square is used, resized to `image_size` (default: the median short side of the training images,
    at most 224, rounded down to whole patches). `root` is never written to.

    Each file is decoded once, before training; the pixels stay in memory if all splits fit in
    `memory_gb`. Else each file is decoded once to see that it can be (what was found is remembered
    in the user's cache folder until a file changes) and again whenever a batch needs it, in
    `num_workers` processes; the pixels are the same.

    Args:
        root: the folder.
        skip_corrupt: leave out files that cannot be decoded, however many. Else more than 1 % of a
            split, or one in a given val or test folder, is an error.
        memory_gb: gigabytes (10⁹ bytes) of pixels that this process may hold; None: half of what is
            available, shared between the processes of this machine.

    The other arguments are those of `ImageDataModule`.

    Raises:
        ValueError: `root` is no folder.
        UserError: in `setup`, if the folders or files are not as described.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        skip_corrupt: bool = False,
        memory_gb: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(0, memory_gb=memory_gb)
        self.root = existing("root", root, folder=True)
        self.skip_corrupt = skip_corrupt
        self.memory_gb = memory_gb

    def default_augment(self) -> Augment:
        return shipped_augment("image_folder")

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        splits, class_names = find_splits(self.root)
        size = self.image_size or default_image_size(median_side(splits["train"].paths))
        count = sum(len(files.paths) for files in splits.values())
        keep = fit_in_memory(count, size, self.memory_gb, self.trainer)
        channels = self.in_channels
        sets: dict[str, ImageSet] = {}
        for split, files in splits.items():  # train comes first and decides on the channels
            images, good = read_images(
                split,
                files.paths,
                files.labels,
                size,
                channels,
                keep=keep,
                skip_corrupt=self.skip_corrupt,
            )
            channels = images.channels
            sets[split] = images.select(good)
            if split == "train":
                _check_all_classes(sets[split], class_names)
        return sets, class_names


def _check_all_classes(train: ImageSet, class_names: list[str]) -> None:
    counts = torch.bincount(train.labels, minlength=len(class_names))
    empty = [name for name, count in zip(class_names, counts.tolist(), strict=True) if not count]
    if empty:
        raise UserError(f"data.root: no image can be decoded in train of {', '.join(empty[:5])}")
