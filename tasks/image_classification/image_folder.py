"""Images in folders, one folder per class."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import nn

from attnkit.lightning.errors import UserError
from attnkit.lightning.files import cache_folder, written_beside
from attnkit.tasks.image_classification.augment import Augment
from attnkit.tasks.image_classification.data import (
    ImageDataModule,
)
from attnkit.tasks.images.decode import Pixels, decode_files, short_side
from attnkit.tasks.images.folder import Files, find_splits, report_failures
from attnkit.tasks.images.sets import FileImages, ImageSet, MemoryImages
from attnkit.tasks.images.sizes import default_image_size

_HEADERS_READ = 1024


class ImageFolderData(ImageDataModule):
    """Images under `root`: `train/`, `val/`, `test/` or what there is of them, a folder per class.

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
        UserError: in `setup`, if the tree or its files are not as above.
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
        if root is None:
            raise ValueError("root: expected a folder of images, got nothing")
        if not Path(root).expanduser().is_dir():
            raise ValueError(f"root: no such folder: {root}")
        if memory_gb is not None and memory_gb < 0:
            raise ValueError(f"memory_gb: expected 0 or more, got {memory_gb}")
        self.root = Path(root).expanduser().absolute()
        self.skip_corrupt = skip_corrupt
        self.memory_gb = memory_gb

    def default_augment(self) -> nn.Module:
        return Augment(horizontal_flip=0.5, crop_min_area=0.5)

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        splits, class_names = find_splits(self.root)
        size = self.image_size or default_image_size(median_side(splits["train"].paths))
        count = sum(len(files.paths) for files in splits.values())
        keep = count * 3 * size**2 <= memory_bytes(self.memory_gb, self.trainer)
        channels = self.in_channels
        sets: dict[str, ImageSet] = {}
        for split, files in splits.items():  # train comes first and decides on the channels
            pixels = (decode_files if keep else check_files)(
                files.paths, size, channels or 3, keep=keep, title=f"{split} images"
            )
            self._report(split, files, pixels)
            good = torch.ones(len(files.paths), dtype=torch.bool)
            good[list(pixels.failures)] = False
            if channels is None:
                channels = 1 if pixels.grey[good].all() else 3
            sets[split] = _image_set(files, pixels, size, channels, good)
            if split == "train":
                _check_all_classes(sets[split], class_names)
        return sets, class_names

    def _report(self, split: str, files: Files, pixels: Pixels) -> None:
        report_failures(
            {files.paths[number]: reason for number, reason in pixels.failures.items()},
            split,
            len(files.paths),
            given=split != "train",
            skip_corrupt=self.skip_corrupt,
        )


def memory_bytes(memory_gb: float | None, trainer: Trainer | None) -> float:
    """Bytes of pixels that a process may hold: what was asked for, or half of what there is."""
    if memory_gb is not None:
        return memory_gb * 1e9
    processes = (
        trainer.num_devices
        if trainer
        else int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    )
    return available_memory() / 2 / processes


def available_memory() -> int:
    """Bytes that this process may still take: what the machine and its control group leave."""
    limits = [4 * 10**9]
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        limits = [int(found[1]) * 1024] if found else limits
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def median_side(paths: Sequence[str]) -> int:
    """The median of the images' shorter sides; of many images, that of some."""
    step = max(1, len(paths) // _HEADERS_READ)
    sides = [side for path in paths[::step] if (side := short_side(path)) is not None]
    return sorted(sides)[len(sides) // 2] if sides else 1


def _image_set(
    files: Files, pixels: Pixels, size: int, channels: int, good: torch.Tensor
) -> ImageSet:
    # A grey set was decoded with three equal channels: the first is all of them.
    labels, rows = torch.tensor(files.labels), good.nonzero().flatten()
    images: ImageSet
    if pixels.images is None:
        sums = pixels.sums[:, :, :channels].clone()
        images = FileImages(files.paths, labels, size, channels, sums)
    else:
        images = MemoryImages(pixels.images[:, :channels].contiguous(), labels)
    return images if good.all() else images.select(rows)


def _check_all_classes(train: ImageSet, class_names: list[str]) -> None:
    counts = torch.bincount(train.labels, minlength=len(class_names))
    empty = [name for name, count in zip(class_names, counts.tolist(), strict=True) if not count]
    if empty:
        raise UserError(f"data.root: no image can be decoded in train of {', '.join(empty[:5])}")


def check_files(paths: list[str], size: int, channels: int, *, keep: bool, title: str) -> Pixels:
    """`decode_files` without keeping the pixels, remembered in the user's cache folder.

    A scan of a large folder takes minutes, and every process of a run and every next run needs its
    result; it holds until a file's name, size or time of change differs.
    """
    key = hashlib.sha256(f"1 {size} {channels}".encode())
    for path in paths:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            key.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="replace"))
    file = cache_folder() / "scans" / f"{key.hexdigest()[:32]}.pt"
    with contextlib.suppress(Exception):  # absent or damaged: scan again
        return Pixels(None, **torch.load(file, weights_only=True))
    pixels = decode_files(paths, size, channels, keep=False, title=title)
    found = {"sums": pixels.sums, "grey": pixels.grey, "failures": pixels.failures}
    # A cache folder that cannot be written only costs time.
    with contextlib.suppress(OSError), written_beside(file) as part:
        torch.save(found, part)
    return pixels
