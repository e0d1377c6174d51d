"""Data of semantic segmentation: sets, the base of data modules (to be subclassed), and scenes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from attnkit.core.arguments import at_least, up_to_1
from attnkit.lightning.resume.sampler import PlacedSampler
from attnkit.tasks.images.data import (
    ImagePaths,
    PredictData,
    SplitImages,
    check_fits_module,
    follow_module,
)
from attnkit.tasks.images.decode import as_tensor, keys_of, read_picture
from attnkit.tasks.images.scan import first_of_equal
from attnkit.tasks.images.scenes import SHAPES, draw, draw_scene, handwriting
from attnkit.tasks.images.sizes import (
    Size,
    checked_size,
    default_image_size,
    default_patch_size,
    fit_of,
    sides,
)
from attnkit.tasks.loaders import BatchItems, module_of
from attnkit.tasks.summary import image_lines, split_line

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
            images, masks = zip(*map(self._one, places), strict=True)
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


class SegmentationDataModule(SplitImages):
    """Pictures with masks in up to three splits; a subclass reads them in `load()`.

    A batch is uint8 images [batch, channels, height, width] and uint8 masks [batch, height, width]:
    class numbers, or 255 where a pixel does not count. With `windows`, batches of validation and
    test are lists of both if pictures differ in size. Pictures are augmented one by one by
    torchvision's v2, together with their masks; the random numbers depend only on the seed, the
    epoch and the place in it.

    Args:
        windows: False: whole pictures are resized to `image_size`, whatever their shape; in
            training after a random crop. True: pictures keep their scale; training uses random
            windows of `image_size`, and the module slides such a window over pictures to test.
            None: as in the module in the trainer, otherwise False.
        crop_min_area: smallest share of a picture that a random crop of training keeps, up to 4/3
            wider or higher than `image_size`; None: no crop. Not with `windows`.
        horizontal_flip: probability of mirroring left and right in training.
        color_jitter: largest change of brightness, contrast and saturation in training, as a share.
        **options: `image_size` (None: the size of the first picture, in whole patches),
            `interpolation`, `batch_size`, `num_workers`, `val_fraction`, `test_fraction` and
            `seed`, as in `SplitImages`.

    Raises:
        ValueError: an argument out of range.
    """

    shuffled = PlacedSampler
    drop_last = False

    def __init__(
        self,
        *,
        windows: bool | None = None,
        crop_min_area: float | None = None,
        horizontal_flip: float = 0.0,
        color_jitter: float = 0.0,
        **options: Any,
    ) -> None:
        if options.get("crop_pct") is not None:
            raise TypeError("crop_pct: every pixel has a class, so that no border is cut off")
        super().__init__(**options)
        up_to_1(horizontal_flip=horizontal_flip, crop_min_area=crop_min_area)
        at_least(0, color_jitter=color_jitter)
        self.windows = windows
        self.in_channels: int | None = None
        self.class_names: list[str] = []
        self.changes: dict[str, Any] = {
            "crop_min_area": crop_min_area or None,
            "horizontal_flip": horizontal_flip,
            "color_jitter": color_jitter,
        }
        if windows and crop_min_area:
            raise ValueError("crop_min_area: windows are cut out of pictures as they are; use None")

    @property
    def augment(self) -> dict[str, Any] | None:
        """The random changes of training; None: there are none."""
        return self.changes if self.windows or any(self.changes.values()) else None

    @abstractmethod
    def load(self) -> tuple[Mapping[str, MaskedImages], list[str]]:
        """Return the splits ("train", and "val" and "test" if they exist) and the class names."""

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data, once."""
        if not self.is_read(stage):
            follow_module(self)
            module = module_of(self)
            if self.windows is None:
                self.windows = bool(getattr(module, "windows", False))
            given, names = self.load()
            if "train" in given and len(given) < len(("train", "val", *self.test_splits)):
                self.first_of_equal = first_of_equal(given["train"].keys())  # kept on one side
            self.sets = self.with_missing_splits(given)
            self.class_names = list(names)
            self.__dict__.pop("statistics", None)  # cached for other sets
            first = next(iter(self.sets.values()))
            self.in_channels = getattr(module, "in_channels", None) or first.channels
            if self.image_size is None:
                fitting = [default_image_size(side) for side in sides(first.size)]
                self.image_size = checked_size(fitting)
        check_fits_module(self)

    def items(self, split: str) -> Pairs:
        pairs, how = self.sets[split], self.interpolation or "bicubic"
        assert self.image_size is not None
        if split == "train" and self.augment is not None:
            windows = bool(self.windows)
            change = augmented(self.image_size, how, windows=windows, **self.changes)
            return Pairs(pairs, change, self.seed)
        is_ready = not pairs.reads_files and sides(pairs.size) == sides(self.image_size)
        as_they_are = is_ready or (self.windows and split != "train")
        return Pairs(pairs, None if as_they_are else resized(self.image_size, how))

    def describe(self) -> dict[str, Any]:
        """Return, after `setup`, the plain values that a model and `SemanticSegmentation` need."""
        assert self.image_size is not None
        mean, std, _ = self.statistics
        return {
            "image_size": self.image_size,
            "patch_size": default_patch_size(self.image_size),
            "interpolation": self.interpolation,
            "windows": bool(self.windows),
            "in_channels": self.in_channels,
            "num_classes": len(self.class_names),
            "class_names": self.class_names,
            "mean": mean,
            "std": std,
        }

    @property
    def class_counts(self) -> Tensor:
        """The number of pixels of each class in up to 1,000 training pictures, after `setup`."""
        return self.statistics[2]

    @cached_property
    def statistics(self) -> tuple[list[float], list[float], Tensor]:
        """The statistics of the training images; see `MaskedImages.statistics`."""
        return self.sets["train"].statistics(len(self.class_names))

    def summary(self) -> list[str]:
        """Return, after `setup`, a few lines that describe the data."""
        counts = {split: len(pairs) for split, pairs in self.sets.items()}
        pixels = self.class_counts.double()
        shares = [
            f"{n} {p:.1%}" for n, p in zip(self.class_names, pixels / pixels.sum(), strict=True)
        ]
        return [
            split_line("images", counts, f" with {len(self.class_names)} classes of pixels"),
            *(f"  {', '.join(shares[at : at + 8])}" for at in range(0, min(len(shares), 40), 8)),
            *image_lines(self.sets["train"], self),
        ]


class SceneMasksData(SegmentationDataModule):
    """Scenes of two things, drawn as in `ScenesData`, with a class for each pixel.

    The 9 classes are 7 shapes, handwritten digits and the background. Things have 8 colours, 2
    sizes and 4 textures, and one may lie inside the other. The digits are scikit-learn's; each of
    them is in one split only. The scenes depend on the seed alone.

    Args:
        num_train, num_val, num_test: number of scenes of each split.
        image_size: side in pixels, at least 24; None: that of the module in the trainer, or 48.
        **options: `batch_size`, `num_workers` and `seed`.
    """

    def __init__(
        self,
        *,
        num_train: int = 8000,
        num_val: int = 200,
        num_test: int = 500,
        image_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(image_size=image_size, **options)
        at_least(1, num_train=num_train, num_val=num_val, num_test=num_test)
        at_least(24, image_size=image_size)
        self.counts = {"train": num_train, "val": num_val, "test": num_test}

    def load(self) -> tuple[Mapping[str, MaskedImages], list[str]]:
        side, _ = sides(self.image_size or 48)
        parts = zip(self.counts.items(), handwriting(self.seed), strict=True)
        sets = {
            split: draw_scenes(split, count, side, digits, self.seed)
            for (split, count), digits in parts
        }
        return sets, ["background", *SHAPES, "digit"]

    def describe(self) -> dict[str, Any]:
        """Describe the data as the base class does; use 8 patches a side if they are whole."""
        found = super().describe()
        side, _ = sides(found["image_size"])
        return {**found, "patch_size": side // 8 if side % 8 == 0 else found["patch_size"]}


def draw_scenes(
    split: str, count: int, side: int, digits: dict[str, np.ndarray], seed: int
) -> MaskedImages:
    """Return `count` scenes, which depend only on the seed and the name of the split."""
    random = Random(f"{seed} {split}")
    images = torch.empty((count, 3, side, side), dtype=torch.uint8)
    masks = torch.zeros((count, side, side), dtype=torch.uint8)
    for image, mask in zip(images, masks, strict=True):
        scene = draw_scene(random)
        picture = draw(scene, side, digits, random)
        image.copy_(torch.from_numpy(picture.image))
        for thing, seen in zip(scene["objects"], picture.masks, strict=True):
            kind = thing["kind"]
            number = 1 + (SHAPES.index(kind) if kind in SHAPES else len(SHAPES))
            mask[torch.from_numpy(seen)] = number
    return MaskedImages(images, masks)


class PicturePaths(ImagePaths):
    """Picture files, fetched by the batch as in `ImagePaths`.

    A batch is a list of whole pictures, uint8 [3, height, width], and a list of their paths.
    """

    def read(self, path: str) -> Tensor:
        return as_tensor(read_picture(path, None, self.fit.value_range))

    def together(self, images: list[Tensor]) -> list[Tensor]:
        return images


class PicturesToSegment(PredictData):
    """Pictures under a folder (at any depth) or one image file, for `Trainer.predict`.

    It differs from `PredictData` in that pictures keep their size: see `PicturePaths`.
    """

    def images_at(self, paths: Sequence[str]) -> PicturePaths:
        return PicturePaths(paths, fit_of(self), self.in_channels)
