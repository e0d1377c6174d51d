"""Data sets of images with labels, in memory or in files, their random crops and ground truth."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from attnkit.lightning.errors import RunError
from attnkit.tasks.images.decode import (
    OwnSize,
    UndecodableImageError,
    as_picture,
    as_tensor,
    keys_of,
    pixel_sums,
    read_file,
    read_image,
    read_picture,
    to_channels,
)
from attnkit.tasks.images.sizes import Fit, Size, sides

_CHUNK = 4096


class ImageSet(Dataset, ABC):
    """Images and labels that are fetched by the batch.

    A DataLoader calls `__getitems__` with all indices of a batch; it returns the batch: uint8
    images [batch, channels, height, width] and int64 labels [batch].

    Attributes:
        size: side of the images in pixels, or [height, width].
        fitted: whether images were resized with the data module's `interpolation` and `crop_pct`.
        rows: int64 [images], indices into the stored images, which parts of a set share.
        known_keys: int64 [images], keys of the files of the images; None: there are no files.
        known_sums: int64 [stored, 2, channels], from `decode_files`; None: not yet computed.
    """

    labels: Tensor
    size: Size
    channels: int
    rows: Tensor
    reads_files = False
    fitted = False
    known_keys: Tensor | None = None
    known_sums: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([number])
        return images[0], labels[0]

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(numbers)
        return self.fetch(rows), self.labels.index_select(0, rows)

    @abstractmethod
    def fetch(self, rows: Tensor) -> Tensor:
        """Return the images with these indices, uint8 [batch, channels, height, width]."""

    def picture(self, row: int) -> Image.Image:
        """Return the whole picture, RGB or grey, that the image with this index is a part of."""
        return as_picture(self.fetch(torch.tensor([row]))[0].permute(1, 2, 0))

    def select(self, rows: Tensor) -> "ImageSet":
        """Return the part of the set with these indices; it shares the pixels."""
        part = copy(self)
        part.rows, part.labels = self.rows[rows], self.labels[rows]
        part.known_keys = None if self.known_keys is None else self.known_keys[rows]
        return part

    def keys(self) -> Tensor:
        """Return a key per image, int64 [images], equal for equal files, or for equal pixels if
        there are no files."""
        if self.known_keys is not None:
            return self.known_keys
        parts = torch.arange(len(self)).split(_CHUNK)
        return keys_of(image.tobytes() for rows in parts for image in self.fetch(rows).numpy())

    def sums(self) -> Tensor:
        """Return sums of pixels and of squared pixels over the set, int64 [2, channels]."""
        if self.known_sums is not None:
            return self.known_sums.index_select(0, self.rows).sum(dim=0)
        total = torch.zeros((2, self.channels), dtype=torch.int64)
        for rows in torch.arange(len(self)).split(_CHUNK):
            total += pixel_sums(self.fetch(rows)).sum(dim=0)
        return total

    @property
    def num_pixels(self) -> int:
        """The number of pixels of one channel of all images."""
        return len(self) * math.prod(sides(self.size))

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Return exact mean and deviation of the pixels, scaled to [0, 1], per channel."""
        first, second = self.sums().double() / self.num_pixels
        std = (second - first.square()).clamp_min(0).sqrt()
        # A constant channel must not lead to a division by zero.
        std = std.clamp_min(1.0)
        return [x / 255 for x in first.tolist()], [x / 255 for x in std.tolist()]


class MemoryImages(ImageSet):
    """Images held as one uint8 tensor; a batch is one `index_select`.

    Args:
        images: uint8 [images, channels, height, width].
        labels: integers [images].
        pictures: the whole pictures that the images are parts of; None, or an empty picture: the
            image is the whole picture.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor | Sequence[int],
        pictures: Sequence[Tensor] | None = None,
    ) -> None:
        self.images = images
        self.pictures = pictures
        self.labels = torch.as_tensor(labels, dtype=torch.int64)
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                "images: expected uint8 images [images, channels, height, width], "
                f"got {images.dtype} {list(images.shape)}"
            )
        if self.labels.shape != images.shape[:1]:
            raise ValueError(
                f"labels: expected {len(images)} of them, got shape {list(self.labels.shape)}"
            )
        self.channels = images.shape[1]
        height, width = images.shape[2:]
        self.size = height if height == width else [height, width]
        self.rows = torch.arange(len(images))

    def fetch(self, rows: Tensor) -> Tensor:
        return self.images.index_select(0, self.rows.index_select(0, rows))

    def picture(self, row: int) -> Image.Image:
        if self.pictures is None:
            return super().picture(row)
        whole = self.pictures[int(self.rows[row])]
        return as_picture(whole) if len(whole) else super().picture(row)


class FileImages(ImageSet):
    """Images that the workers of the DataLoader decode on access.

    Args:
        paths: the files, known to be decodable.
        labels: integers [images].
        fit: how pictures are resized.
        channels: 1 (grey) or 3.
        pixel_sums: int64 [images, 2, channels], from `decode_files`.
        least_area: number of pixels that whole pictures keep: see `read_picture`.
    """

    reads_files = True
    fitted = True

    def __init__(
        self,
        paths: Sequence[str],
        labels: Tensor,
        fit: Fit,
        channels: int,
        pixel_sums: Tensor,
        least_area: float | None = None,
    ) -> None:
        self.paths = list(paths)
        self.labels, self.known_sums = labels, pixel_sums
        self.rows = torch.arange(len(paths))
        self.fit, self.size, self.channels = fit, fit.size, channels
        self.least_area = least_area

    def fetch(self, rows: Tensor) -> Tensor:
        paths = (self.paths[row] for row in self.rows[rows].tolist())
        images = [_unchanged(path, read_image, *self.fit) for path in paths]
        return to_channels(torch.stack(images), self.channels)

    def picture(self, row: int) -> Image.Image:
        path = self.paths[int(self.rows[row])]
        return _unchanged(path, read_picture, self.least_area, self.fit.value_range)


class NativeImages(ImageSet):
    """Labelled images of their own sizes, in memory or decoded on access.

    A batch is a list of uint8 images [channels, height, width] and int64 labels [batch].

    Args:
        paths: the files; indices of those that can be decoded are selected later.
        labels: integers [images].
        how: how pictures become images.
        channels: 1 (grey) or 3.
        sizes: number of patches of each file, int64 [files]; 0 if it cannot be decoded.
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
        kept: Sequence[Tensor | None] | None,
    ) -> None:
        self.paths, self.labels, self.how = list(paths), labels, how
        self.channels, self.sizes, self.known_sums, self.kept = channels, sizes, pixel_sums, kept
        self.rows = torch.arange(len(paths))
        middle = sizes[sizes > 0].double().median()
        self.size = round(math.sqrt(float(middle))) * how.patch_size
        self.reads_files = kept is None

    def fetch(self, rows: Tensor) -> Any:
        """Return the images with these indices as a list."""
        numbers = self.rows[rows].tolist()
        return [self.kept[n] for n in numbers] if self.kept is not None else self._read(numbers)

    def _read(self, numbers: Sequence[int]) -> list[Tensor]:
        images = (_unchanged(self.paths[n], read_file, self.how).image for n in numbers)
        return [to_channels(image, self.channels) for image in images]

    def select(self, rows: Tensor) -> ImageSet:
        part: Any = super().select(rows)
        part.sizes = self.sizes[rows]
        return part

    @property
    def num_pixels(self) -> int:
        return int(self.sizes.sum()) * self.how.patch_size**2


def _unchanged(path: str, read: Callable[..., Any], *how: Any) -> Any:
    try:
        return read(path, *how)
    except UndecodableImageError as error:
        raise RunError(f"{path} changed while in use: {error}") from error


Place = tuple[int, int, int]


class TrainingImages(Dataset):
    """Images fetched by the batch, by the triples (epoch, place, index) of a `PlacedSampler`.

    With a crop, an image is another part of its whole picture each time it is fetched. The part
    depends only on the seed, the epoch and the place in the epoch, for any number of processes and
    workers.

    Args:
        images: the set.
        crop: maps a picture to one of the size of the images and draws from torch's generator;
            None: images are not cropped.
        seed: seed of the crops.
    """

    def __init__(
        self, images: ImageSet, crop: Callable[[Image.Image], Image.Image] | None, seed: int
    ) -> None:
        self.images = images
        self.crop = crop
        self.seed = seed

    @property
    def labels(self) -> Tensor:
        return self.images.labels

    @property
    def reads_files(self) -> bool:
        """Whether fetching takes enough work for worker processes."""
        return self.images.reads_files or self.crop is not None

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        rows = [number for _, _, number in places]
        if self.crop is None:
            return self.images.__getitems__(rows)
        cropped = []
        with torch.random.fork_rng(devices=[]):
            for epoch, place, number in places:
                key = np.random.SeedSequence([self.seed, epoch, place])
                torch.default_generator.manual_seed(int(key.generate_state(1)[0]))
                cropped.append(as_tensor(self.crop(self.images.picture(number))))
        pixels, channels = torch.stack(cropped), self.images.channels
        if pixels.shape[1] != channels:
            pixels = to_channels(pixels, channels)
        return pixels, self.labels[rows]

    def __getitem__(self, place: Place) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([place])
        return images[0], labels[0]


@dataclass(frozen=True)
class Truth:
    """Images and masks of the objects in them that show the right answer.

    images: uint8 [images, channels, height, width], as the model takes them.
    masks: bool [images, objects, height, width]: True = the object.
    classes: int64 [images, objects]: the class that each object shows; None for captions.
    objects_of: for captions, maps (index of the image, sentence) to pairs (index of the word, index
        of the object that it names).
    """

    images: Tensor
    masks: Tensor
    classes: Tensor | None = None
    objects_of: Callable[[int, str], list[tuple[int, int]]] | None = None

    def mask_of(self, image: int, class_number: int) -> Tensor | None:
        """Return the mask of the objects that show a class, bool [height, width], or None if the
        image has none."""
        if self.classes is None:
            raise ValueError(
                "mask_of: objects of captions have words instead of classes; use objects_of"
            )
        found = (self.classes[image] == class_number).nonzero().flatten().tolist()
        return self.masks[image, found].any(dim=0) if found else None


@runtime_checkable
class KnowsTruth(Protocol):
    """A data module that knows where the evidence is in its images, after `setup`."""

    def truth(self, split: str = "test") -> Truth:
        """Return the ground truth of the images of a split, in its order."""
        ...
