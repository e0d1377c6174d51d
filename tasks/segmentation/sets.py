"""Data sets of pictures with masks, and their random changes."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from attnkit.tasks.images.decode import keys_of
from attnkit.tasks.images.sizes import Size, sides
from attnkit.tasks.loaders import BatchItems

IGNORED = 255  # mask value of a pixel that counts in no loss and no metric
MOST_CLASSES = 255
_LOOKED_AT = 1000  # number of pictures that statistics are computed from
Change = Callable[[Any, Any], Any]


class MaskedImages(BatchItems):
    """Pictures in memory, with the class of each pixel.

    Args:
        images: uint8 [images, channels, height, width].
        masks: uint8 [images, height, width], class numbers, 255 where a pixel does not count.
    """

    reads_files = False

    def __init__(self, images: Tensor, masks: Tensor) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                "images: expected uint8 [images, channels, height, width], "
                f"got {images.dtype} {list(images.shape)}"
            )
        expected = [len(images), *images.shape[2:]]
        if masks.dtype != torch.uint8 or list(masks.shape) != expected:
            raise ValueError(
                f"masks: expected uint8 {expected}, as the images are, "
                f"got {masks.dtype} {list(masks.shape)}"
            )
        self.images, self.masks, self.rows = images, masks, torch.arange(len(images))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> Size:
        """Side, or [height, width], of the first picture in pixels."""
        height, width = self.pair(0)[1].shape
        return height if height == width else [height, width]

    @property
    def channels(self) -> int:
        return self.pair(0)[0].shape[0]

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a picture, uint8 [channels, height, width], and its mask, uint8 [height,
        width]."""
        row = self.rows[number]
        return self.images[row], self.masks[row]

    def select(self, rows: Tensor) -> Any:
        """Return the part of the set with these indices; it shares the pixels."""
        part = copy(self)
        part.rows = self.rows[rows]
        return part

    def keys(self) -> Tensor:
        """Return a key per picture, int64 [images], equal for equal pictures."""
        return keys_of(self.pair(number)[0].numpy().tobytes() for number in range(len(self)))

    def statistics(self, num_classes: int) -> tuple[list[float], list[float], Tensor]:
        """Return mean and deviation of the pixels, scaled to [0, 1], per channel, and the number of
        pixels of each class, of up to a thousand pictures."""
        sums, counts, total = torch.zeros(2, self.channels).double(), torch.zeros(256), 0
        for number in range(0, len(self), -(-len(self) // _LOOKED_AT)):
            image, mask = self.pair(number)
            pixels = image.flatten(1).double() / 255
            sums += torch.stack([pixels.sum(dim=1), pixels.square().sum(dim=1)])
            counts += mask.flatten().bincount(minlength=256)
            total += pixels.shape[1]
        mean, squares = sums / total
        std = (squares - mean.square()).clamp_min(0).sqrt().clamp_min(1 / 255)
        return mean.tolist(), std.tolist(), counts[:num_classes].long()


class Pairs(BatchItems):
    """Data set of a loader: batches of transformed pictures with their masks.

    A batch is uint8 images [batch, channels, height, width] and masks [batch, height, width], or
    lists of both if sizes differ.

    Args:
        pairs: the set.
        change: transform of picture and mask together, such as one of torchvision's v2, or None.
        seed: seed of random changes, which depend besides only on the epoch and the place in it, if
            a `PlacedSampler` gives triples (epoch, place, index).
    """

    def __init__(self, pairs: MaskedImages, change: Change | None, seed: int = 0) -> None:
        self.pairs, self.change, self.seed = pairs, change, seed
        self.reads_files = pairs.reads_files

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, places: Sequence[Any]) -> Any:
        with torch.random.fork_rng(devices=[]):
            made = [self._one(place) for place in places]
        images, masks = zip(*made, strict=True)
        if len({mask.shape for mask in masks}) > 1:
            return list(images), list(masks)
        return torch.stack(images), torch.stack(masks)

    def _one(self, place: Any) -> tuple[Tensor, Tensor]:
        *drawn, number = place if isinstance(place, tuple) else (place,)
        image, mask = self.pairs.pair(number)
        if self.change is None:
            return image, mask
        if drawn:
            key = np.random.SeedSequence([self.seed, *drawn])
            torch.default_generator.manual_seed(int(key.generate_state(1)[0]))
        image, mask = self.change(tv_tensors.Image(image), tv_tensors.Mask(mask))
        return image.as_subclass(Tensor), mask.as_subclass(Tensor)


def resized(size: Size, interpolation: str = "bicubic") -> v2.Transform:
    """Return a transform to one size; masks are resized by the nearest pixel."""
    return v2.Resize(sides(size), InterpolationMode(interpolation), antialias=True)


def augmented(
    size: Size,
    interpolation: str,
    *,
    windows: bool,
    crop_min_area: float | None,
    horizontal_flip: float,
    color_jitter: float,
) -> v2.Transform:
    """Return the random transform of training; see `SegmentationDataModule` for the arguments."""
    high, wide = sides(size)
    steps: list[Any] = []
    if windows:
        fill: Any = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORED}
        steps.append(v2.RandomCrop((high, wide), pad_if_needed=True, fill=fill))
    elif crop_min_area is not None:
        ratio = 3 / 4 * wide / high, 4 / 3 * wide / high
        how = InterpolationMode(interpolation)
        steps.append(v2.RandomResizedCrop((high, wide), (crop_min_area, 1.0), ratio, how))
    else:
        steps.append(resized(size, interpolation))
    steps += [v2.RandomHorizontalFlip(horizontal_flip)] if horizontal_flip else []
    steps += [v2.ColorJitter(*3 * [color_jitter])] if color_jitter else []
    return v2.Compose(steps)
