"""Images that keep their size and aspect ratio: sides of whole patches, batches of lists."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule
from PIL import Image
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.lightning.errors import UserError
from attnkit.tasks.images.decode import (
    UndecodableImageError,
    as_tensor,
    keys_of,
    pixel_sums,
    read_picture,
    to_channels,
)
from attnkit.tasks.images.files import Files, report_failures, say, say_once
from attnkit.tasks.images.scan import first_of_equal, memory_bytes, read_splits, with_progress
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.loaders import BatchItems, TokenSampler, module_of, token_loader

MAX_IMAGE_TOKENS = 1024


class OwnSize(NamedTuple):
    """Rules by which a picture becomes an image of its own size.

    Each side becomes the nearest multiple of the patch. A picture of more than `max_tokens` patches
    is shrunk to at most that many, with its aspect ratio.

    Attributes:
        patch_size: side of a patch in pixels.
        max_tokens: maximum number of patches of an image.
        interpolation, value_range: as in `Fit`.
    """

    patch_size: int
    max_tokens: int
    interpolation: str = "bicubic"
    value_range: Sequence[float] | None = None

    @classmethod
    def of(cls, data: Any, patch_size: int, max_tokens: int) -> OwnSize:
        return cls(patch_size, max_tokens, data.interpolation or "bicubic", data.value_range)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of a picture of this height and width in pixels.

        Raises:
            UndecodableImageError: a side is shorter than a patch.
        """
        if min(height, width) < self.patch_size:
            raise UndecodableImageError(
                f"{width} × {height} pixels, a side is below the patch of {self.patch_size}"
            )
        factor = min(1.0, self.patch_size * math.sqrt(self.max_tokens / (height * width)))
        rows, columns = (max(1, round(n * factor / self.patch_size)) for n in (height, width))
        if rows * columns > self.max_tokens:  # because of rounding
            if rows > columns:
                return self.max_tokens // columns, columns
            return rows, self.max_tokens // rows
        return rows, columns

    def read(self, path: str) -> tuple[Tensor, bool]:
        """Read a file as uint8 RGB [3, height, width], and return whether it was shrunk.

        Raises:
            UndecodableImageError: the file cannot be decoded, or is too small.
        """
        most = self.max_tokens * self.patch_size**2
        picture = read_picture(path, most, self.value_range)
        rows, columns = self.grid(picture.height, picture.width)
        size = columns * self.patch_size, rows * self.patch_size
        shrunk = picture.width * picture.height > 1.01 * most
        if size != picture.size:
            picture = picture.resize(size, Image.Resampling[self.interpolation.upper()])
        return as_tensor(picture), shrunk


class NativeImages(ImageSet):
    """Labelled images of their own sizes, in memory or decoded on access.

    A batch is a list of uint8 images [channels, height, width] and int64 labels [batch].

    Args:
        paths: the files, known to be decodable.
        labels: integers [images].
        how: how pictures become images.
        channels: 1 (grey) or 3.
        sizes: number of patches of each image, int64 [images].
        pixel_sums: int64 [images, 2, channels].
        kept: the decoded images; None: they are read from the files.
    """

    fitted = True

    def __init__(
        self,
        paths: Sequence[str],
        labels: Tensor,
        how: OwnSize,
        channels: int,
        sizes: Tensor,
        pixel_sums: Tensor,
        kept: Sequence[Tensor] | None,
    ) -> None:
        self.paths, self.labels, self.how = list(paths), labels, how
        self.channels, self.sizes, self.known_sums, self.kept = channels, sizes, pixel_sums, kept
        self.rows = torch.arange(len(paths))
        self.size = round(math.sqrt(float(sizes.double().median()))) * how.patch_size
        self.reads_files = kept is None

    def fetch(self, rows: Tensor) -> Any:
        """Return the images with these indices as a list."""
        return [self._read(row) for row in self.rows[rows].tolist()]

    def _read(self, row: int) -> Tensor:
        if self.kept is not None:
            return self.kept[row]
        return to_channels(self.how.read(self.paths[row])[0][None], self.channels)[0]

    def select(self, rows: Tensor) -> ImageSet:
        part: Any = super().select(rows)
        part.sizes = self.sizes[rows]
        return part

    @property
    def num_pixels(self) -> int:
        return int(self.sizes.sum()) * self.how.patch_size**2


class NativeItems(BatchItems):
    """Images fetched by lists of indices, or of pairs (epoch, index), of a `TokenSampler`.

    Args:
        images: the set; its `sizes` are the numbers of patches.
        batch_tokens: maximum number of patches of a batch, for the sampler.
    """

    def __init__(self, images: Any, batch_tokens: int) -> None:
        self.images, self.batch_tokens = images, batch_tokens
        self.sizes, self.reads_files = images.sizes, images.reads_files

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, numbers: Sequence[Any]) -> Any:
        lists = (some if isinstance(some, list) else [some] for some in numbers)
        return self.images.__getitems__([*chain.from_iterable(lists)])


class NativePaths(BatchItems):
    """Files to predict; a batch is a list of images of their own sizes and a list of paths.

    A file that cannot be decoded is printed and left out.
    """

    def __init__(self, paths: Sequence[str], how: OwnSize, channels: int) -> None:
        self.paths, self.how, self.channels = list(paths), how, channels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Any, list[str]]:
        images, paths = [], []
        for path in (self.paths[number] for number in numbers):
            try:
                image = self.how.read(path)[0]
            except UndecodableImageError as error:
                say(f"left out: {path} ({error})")
                continue
            images.append(to_channels(image[None], self.channels)[0])
            paths.append(path)
        none = torch.empty((0, self.channels, 0, 0), dtype=torch.uint8)
        return (images or none), paths


def read_native(
    data: Any, splits: Mapping[str, Files], channels: int | None, how: OwnSize
) -> dict[str, tuple[ImageSet, Tensor]]:
    """Read the images of each split as `read_splits` does, but at their own sizes.

    Each file is decoded once. The result holds for each split the images and the indices of the
    files that can be decoded.

    Raises:
        UserError: see `report_failures`.
    """
    left = memory_bytes(data.memory_gb, data.trainer)
    found: dict[str, tuple[ImageSet, Tensor]] = {}
    keys = []
    for split, files in splits.items():
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            looked: list[Any] = [None] * len(files.paths)
            steps = pool.map(partial(_look_at, how, files.paths, looked), range(len(looked)))
            held = 0
            for number, _ in enumerate(with_progress(steps, len(looked), f"{split} images")):
                if isinstance(looked[number], _Look):
                    held += looked[number].image.numel()
                    if held > left:  # all are then read again on access
                        looked[number] = looked[number]._replace(image=None)
        by_path = zip(files.paths, looked, strict=True)
        failures = {path: one for path, one in by_path if isinstance(one, str)}
        report_failures(
            failures, split, len(looked), given=split != "train", skip_corrupt=data.skip_corrupt
        )
        good = [number for number, one in enumerate(looked) if not isinstance(one, str)]
        seen: list[_Look] = [looked[number] for number in good]
        shrunk = [files.paths[number] for number, one in zip(good, seen, strict=True) if one.shrunk]
        if shrunk:
            say_once(
                f"{split}: {len(shrunk):,} of {len(looked):,} images have more than "
                f"{how.max_tokens:,} patches and are shrunk to that: {shrunk[0]}"
                f"{', …' if len(shrunk) > 1 else ''}; data.max_image_tokens"
            )
        channels = channels or (1 if all(one.grey for one in seen) else 3)
        paths = [files.paths[number] for number in good]
        sizes = torch.tensor([one.size for one in seen])
        sums = torch.stack([one.sums for one in seen])[:, :, :channels].clone()
        labels = torch.tensor(files.labels, dtype=torch.int64)[good]
        needed = float(sizes.sum()) * how.patch_size**2 * channels
        kept = None
        if max(held, needed) <= left:
            left -= needed
            whole = (one.image.expand(3, -1, -1) for one in seen)
            kept = [to_channels(image[None], channels)[0].contiguous() for image in whole]
        images = NativeImages(paths, labels, how, channels, sizes, sums, kept)
        images.known_keys = torch.cat([one.key for one in seen])
        keys.append(images.known_keys)
        found[split] = images, torch.arange(len(images))
    count = len(found["train"][0]) if "train" in found else 0
    data.first_of_equal = first_of_equal(torch.cat(keys))[:count]
    return found


class _Look(NamedTuple):
    """The decoded image of a file and its properties.

    `image` has one channel if it is grey; it is None if there is no memory for it. `size` is the
    number of patches.
    """

    image: Any
    size: int
    sums: Tensor
    grey: bool
    key: Tensor
    shrunk: bool


def _look_at(how: OwnSize, paths: Sequence[str], looked: list[Any], number: int) -> int:
    """Put the `_Look` of a file, or the reason why it cannot be read, into `looked`; return 1."""
    try:
        image, shrunk = how.read(paths[number])
    except UndecodableImageError as error:
        looked[number] = str(error)
        return 1
    size = image.shape[1] * image.shape[2] // how.patch_size**2
    grey, key = bool((image == image[:1]).all()), keys_of([Path(paths[number]).read_bytes()])
    small = image[:1].clone() if grey else image
    looked[number] = _Look(small, size, pixel_sums(image[None])[0], grey, key, shrunk)
    return 1


def crop_patches(image: Tensor, min_area: float, patch_size: int) -> Tensor:
    """Crop a random part of whole patches, with about the image's aspect ratio and at least about
    this share of its area. Nothing is resized, so that a smaller part has fewer tokens."""
    grid = image.shape[-2] // patch_size, image.shape[-1] // patch_size
    side = math.sqrt(min_area + (1 - min_area) * float(torch.rand(())))
    height, width = (max(1, round(count * side)) * patch_size for count in grid)
    top = int(torch.randint(image.shape[-2] - height + 1, ()))
    left = int(torch.randint(image.shape[-1] - width + 1, ()))
    return image[..., top : top + height, left : left + width]


class KeepsSizes(LightningDataModule):
    """Mixin for data modules of image files that can keep the sizes of images (`native`).

    It stands before the base class of the task.
    """

    native = False
    crop_pct: float | None
    sets: dict[str, Any]
    make_loader: Any
    shuffled: Any

    def set_native(
        self,
        native: bool,
        max_tokens: int | None,
        max_image_tokens: int | None,
        patch_size: int | None,
        *,
        shuffled: type[TokenSampler],
        **excluded: Any,
    ) -> None:
        """Set `native` and the options that depend on it.

        Args:
            native, max_tokens, max_image_tokens, patch_size: as in `ImageFolderData`.
            shuffled: the sampler of training.
            **excluded: options that must be None with `native`.

        Raises:
            ValueError: an option needs `native`, or `native` excludes it.
        """
        given = {
            "max_tokens": max_tokens,
            "max_image_tokens": max_image_tokens,
            "patch_size": patch_size,
        }
        at_least(2, **given)
        self.native = native
        if not native:
            if named := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"{named[0]}: needs native=True, got {given[named[0]]}")
            return
        excluded["crop_pct"] = None if self.crop_pct == 1 else self.crop_pct
        if named := [name for name, value in excluded.items() if value is not None]:
            raise ValueError(f"{named[0]}: not with native=True, got {excluded[named[0]]}")
        self.max_tokens = max_tokens or 4096
        self.max_image_tokens = max_image_tokens or min(1024, max(1, self.max_tokens // 4))
        self.patch_size = patch_size or 16
        if 2 * self.max_image_tokens > self.max_tokens:
            raise ValueError(
                f"max_image_tokens: expected at most half of max_tokens={self.max_tokens}, got "
                f"{self.max_image_tokens}"
            )
        self.make_loader, self.shuffled = token_loader, shuffled

    def read(
        self, splits: Mapping[str, Files], channels: int | None, kept_area: float | None = None
    ) -> dict[str, tuple[ImageSet, Tensor]]:
        """Read the images of each split with `read_native` or `read_splits`."""
        if not self.native:
            return read_splits(self, splits, channels, kept_area)
        how = OwnSize.of(self, self.patch_size, self.max_image_tokens)
        return read_native(self, splits, channels, how)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)  # type: ignore[arg-type]
        if self.native:
            check_native(self)

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = super().describe()  # type: ignore[misc]
        if not self.native:
            return facts
        own = {"native": True, "patch_size": self.patch_size}
        return {**facts, **own, "max_image_tokens": self.max_image_tokens}

    def items(self, split: str) -> Any:
        if not self.native:
            return super().items(split)  # type: ignore[misc]
        images = self.sets[split]
        # A training batch may exceed the limit by up to the largest image: see `TokenSampler`.
        more = int(images.sizes.max()) if split == "train" else 0
        return NativeItems(images, self.max_tokens - more)


def vit_of(module: Any) -> Any:
    """Return the network that reads a module's images: its model, or the ViT of its encoder."""
    model = getattr(module, "model", None)
    encoder = getattr(model, "encoder", model)
    return getattr(encoder, "vit", encoder)


def check_native(data: Any) -> None:
    """Raise UserError if the module in the trainer does not take images of different sizes."""
    module = module_of(data)
    if module is None:
        return
    vit = vit_of(module)
    if not getattr(vit, "native", False):
        of_encoder = hasattr(module.model, "encoder")
        wanted = "encoder=vit, with encoder." if of_encoder else "attnkit.ViT with model."
        raise UserError(
            f"data.native: {type(vit).__name__} takes images of one size alone; expected "
            f"{wanted}native=true"
        )
    if getattr(module, "mix", None) is not None:
        raise UserError(
            "module.mixup, module.cutmix: they mix images of one size, and those of "
            "data.native=true have their own; expected 0"
        )
    patch = tuple(vit.patch_embed.patch_size)
    if patch != (data.patch_size, data.patch_size):
        raise UserError(
            f"data.patch_size: got {data.patch_size}, but the model has patches of "
            f"{patch[0]} × {patch[1]}; data.patch_size={patch[0]}"
        )
