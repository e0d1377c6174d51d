"""Data modules for image classification: the base, which users subclass, digits and CIFAR-10."""

import os
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from attnkit.core.arguments import choice, existing
from attnkit.core.operators.files import cache_folder
from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import BalancedSampler, PlacedSampler, stratified_split
from attnkit.tasks.image_classification.augment import (
    LEAST_CROP,
    Augment,
    random_crop,
    shipped_augment,
)
from attnkit.tasks.images.data import SplitImages, check_fits_module, follow_module
from attnkit.tasks.images.decode import to_channels
from attnkit.tasks.images.sets import ImageSet, MemoryImages, TrainingImages
from attnkit.tasks.images.sizes import (
    Fit,
    default_image_size,
    default_patch_size,
    fit_of,
    sides,
)
from attnkit.tasks.loaders import module_of
from attnkit.tasks.summary import class_lines, image_lines, outputs_text, split_line, value_lines

AugmentArgument = nn.Module | Mapping[str, Any] | Literal["default"] | None


class ImageDataModule(SplitImages):
    """Labelled images in up to three splits; a subclass reads them in `load()`.

    Splits that `load()` does not return are taken from train, stratified by class. A batch is uint8
    images [batch, channels, height, width] and int64 labels [batch]. After the transfer to the
    device, images are converted to `image_size` and `in_channels`, and in training augmented; only
    random crops are taken before that, from the whole pictures. The augmentation depends only on
    the seed, the step and the process.

    Args:
        in_channels: 1 (grey) or 3 (RGB); None: that of the module, otherwise of the training
            images.
        augment: `Augment` or any module on uint8 batches; a mapping of the arguments of `Augment`;
            None for no augmentation; "default" for that of `default_augment`.
        sampling: "balanced": every class gets the same share of an epoch (see `BalancedSampler`);
            None: every training image occurs once.
        drop_last: leave out the last training batch of an epoch if it is smaller.
        **options: `image_size`, `interpolation`, `crop_pct`, `value_range`, `batch_size`,
            `num_workers`, `val_fraction`, `test_fraction` and `seed`, as in `SplitImages`.

    Examples:
        >>> class Cells(ImageDataModule):
        ...     def load(self):
        ...         images, labels = torch.load("cells.pt")  # uint8 [images, channels, side, side]
        ...         return {"train": MemoryImages(images, labels)}, ["healthy", "infected"]
    """

    target = "classes"
    """The kind of labels that is learned; for "labels" and "numbers" the labels of sets are float32
    [images, outputs]."""
    shuffled: type[PlacedSampler] = PlacedSampler
    least = ": three of a class, at least"

    def __init__(
        self,
        *,
        in_channels: int | None = None,
        augment: AugmentArgument = "default",
        sampling: Literal["balanced"] | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if in_channels not in (None, 1, 3):
            raise ValueError(f"in_channels: expected 1, 3 or None, got {in_channels}")
        self.in_channels = in_channels
        self.augment = self._make_augment(augment)
        self.sampling = sampling
        if sampling is not None:
            choice(("balanced",), sampling=sampling)
            self.shuffled = BalancedSampler
        self.drop_last = drop_last
        self.class_names: list[str] = []
        self.chosen: dict[str, dict[str, Any]] = {}
        """Values that the training images decided, by argument; for `augment`, the arguments of
        `Augment`."""

    @abstractmethod
    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        """Return the splits ("train", and "val" and "test" if they exist) and the class names."""

    def default_augment(self) -> nn.Module | None:
        """Return the augmentation that `augment="default"` means for these images."""
        return None

    def setup(self, stage: str | None = None) -> None:
        """Load and split the images, once: all stages need the size, mean and deviation of the
        training images, except the test of a trained module, which may use other images."""
        if self.is_read(stage):
            check_fits_module(self)  # the trainer may have been attached after the first setup
            return
        follow_module(self)
        self.in_channels = self.in_channels or getattr(module_of(self), "in_channels", None)
        given, class_names = self.load()
        if len(class_names) < 2 and self.target == "classes":
            raise UserError(f"data: expected at least two classes, got {class_names}")
        self.sets = self.with_missing_splits(given)
        self.class_names = list(class_names)
        for split, images in self.sets.items() if self.target == "classes" else ():
            if images.labels.min() < 0 or images.labels.max() >= len(class_names):
                raise UserError(f"data: {split} has labels outside 0 to {len(class_names) - 1}")
        first = next(iter(self.sets.values()))
        self.in_channels = self.in_channels or first.channels
        if self.image_size is None:
            self.image_size = self.default_size(first)
        if "train" in self.sets and isinstance(self.augment, Augment) and self.augment.is_open:
            from attnkit.tasks.image_classification.augment import settle  # few need it

            self.chosen["augment"] = settle(self.augment, self.sets["train"])
        check_fits_module(self)

    def default_size(self, images: ImageSet) -> int:
        """Return the image size that is used if neither the user nor the module sets one."""
        return default_image_size(min(sides(images.size)))

    @property
    def train_labels(self) -> Tensor:
        """The classes of the training images, after `setup`."""
        return self.sets["train"].labels

    def describe(self) -> dict[str, Any]:
        """Return, after `setup`, the plain values that a model and `ImageClassification` need."""
        if not self.sets or self.image_size is None or self.in_channels is None:
            raise RuntimeError("describe() comes after setup()")
        mean, std = self.sets["train"].mean_and_std()
        if len(mean) < self.in_channels:
            mean, std = mean * self.in_channels, std * self.in_channels
        elif len(mean) > self.in_channels:
            train = self.sets["train"]
            parts = torch.arange(len(train)).split(256)
            grey = torch.cat([to_channels(train.fetch(rows), 1) for rows in parts])
            mean, std = MemoryImages(grey, train.labels).mean_and_std()
        return {
            "image_size": self.image_size,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "value_range": self.value_range,
            "patch_size": default_patch_size(self.image_size, len(self.sets["train"])),
            "in_channels": self.in_channels,
            "num_classes": len(self.class_names),
            "class_names": self.class_names,
            "mean": mean,
            "std": std,
        }

    def summary(self) -> list[str]:
        """Return, after `setup`, a few lines that describe the data."""
        counts = {split: len(images) for split, images in self.sets.items()}
        rest = outputs_text(self.target, len(self.class_names))
        labels = {split: images.labels for split, images in self.sets.items()}
        lines = class_lines if self.target == "classes" else value_lines
        return [
            split_line("images", counts, rest),
            *lines(labels, self.class_names),
            *image_lines(self.sets["train"], self),
        ]

    @property
    def crop_min_area(self) -> float | None:
        """`crop_min_area` of the augmentation; None: training images are not cropped at random."""
        return self.augment.crop_min_area if isinstance(self.augment, Augment) else None

    @property
    def kept_crop_area(self) -> float | None:
        """The smallest crop that whole pictures are kept for. It is known before they are read and
        does not depend on what "auto" chooses, so that a resumed run reads the same pixels."""
        area = self.crop_min_area
        return area if area is None else LEAST_CROP if area == "auto" else min(area, LEAST_CROP)

    def items(self, split: str) -> Any:
        if split != "train":
            return self.sets[split]
        crop = None
        if self.crop_min_area is not None:
            fit = fit_of(self)
            crop = random_crop(self.crop_min_area, sides(fit.size), fit.interpolation)
        return TrainingImages(self.sets[split], crop, self.seed)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, Tensor):  # `example_input_array`, for Lightning's summary
            return batch
        images, *rest = batch
        training = self.trainer is not None and self.trainer.training
        cropped = training and self.crop_min_area is not None
        images = self.fitted_images(images, cropped=cropped)
        if self.augment is not None and self.trainer is not None and training:
            # A seed of its own per step and process: the augmentation depends on nothing else, and
            # the model's random numbers do not depend on the augmentation.
            step = self.trainer.fit_loop.total_batch_idx + 1
            key = np.random.SeedSequence([self.seed, self.trainer.global_rank, step])
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int(key.generate_state(1)[0]))
                images = self.augmented(images, cropped=cropped)
        return (images, *rest)

    def fitted_images(self, images: Any, *, cropped: bool) -> Any:
        """Convert the images of a batch to the size and channels of the module."""
        fitted = cropped or next(iter(self.sets.values())).fitted
        return fit_images(images, fit_of(self), self.in_channels, fitted=fitted)

    def augmented(self, images: Any, *, cropped: bool) -> Any:
        """Augment training images; if they are cropped already, apply only the other changes."""
        if cropped and isinstance(self.augment, Augment):
            return self.augment.after_crop(images)
        return self.augment(images) if self.augment is not None else images

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

    def split_rows(self, train: ImageSet, fractions: Sequence[float]) -> list[Tensor]:
        """Split about these fractions off every class; classes of one or two images stay in
        train."""
        return stratified_split(train.labels, fractions, self.seed)


def fit_images(images: Tensor, fit: Fit, channels: int | None, *, fitted: bool) -> Tensor:
    """Convert a uint8 batch to a size and a number of channels.

    Args:
        images: [batch, channels, height, width].
        fit: the size, and how images are resized to it.
        channels: 1 or 3; None leaves the channels as they are.
        fitted: True if images of that size need no further crop.
    """
    if channels is not None and images.shape[1] != channels:
        if images.shape[1] == 1:
            images = images.expand(-1, channels, -1, -1)
        else:
            images = to_channels(images, channels)
    height, width = images.shape[-2:]
    size, resized = sides(fit.size), fit.resized(height, width)
    if (height, width) != size or not (fitted or resized == size):
        how = InterpolationMode(fit.interpolation)
        images = F.resize(images, list(resized), how, antialias=fit.interpolation != "nearest")
        images = F.center_crop(images, list(size))
    return images


class DigitsData(ImageDataModule):
    """The 1,797 handwritten digits that come with scikit-learn, grey, 8 × 8 pixels.

    Source: UCI, Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), the part
    that scikit-learn ships. The arguments are those of `ImageDataModule`.
    """

    def __init__(self, *, test_fraction: float = 0.2, **options: Any) -> None:
        super().__init__(test_fraction=test_fraction, **options)

    def default_augment(self) -> Augment:
        return shipped_augment("digits")

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        from sklearn.datasets import load_digits  # takes half a second, which only this data needs

        digits = load_digits()
        # The data has 17 grey values, 0 to 16.
        images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)
        labels = torch.from_numpy(digits.target)
        return {"train": MemoryImages(images.unsqueeze(1), labels)}, [str(d) for d in range(10)]


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
