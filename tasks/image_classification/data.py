"""Data modules for image classification; users subclass `ImageDataModule`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from attnkit.core.arguments import choice
from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import BalancedSampler, PlacedSampler, stratified_split
from attnkit.tasks.image_classification.augment import LEAST_CROP, Augment, random_crop
from attnkit.tasks.images.crops import TrainingImages
from attnkit.tasks.images.data import (
    SplitImages,
    check_fits_module,
    fit_of,
    follow_module,
    module_of,
)
from attnkit.tasks.images.decode import to_channels
from attnkit.tasks.images.sets import ImageSet, MemoryImages
from attnkit.tasks.images.sizes import (
    Fit,
    default_image_size,
    default_patch_size,
    sides,
)
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
        if not self.is_read(stage):
            self._read()
        check_fits_module(self)  # the trainer may have been attached after the first setup

    def _read(self) -> None:
        self._follow_module()
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
            from attnkit.tasks.image_classification.choose import settle  # few need it

            self.chosen["augment"] = settle(self.augment, self.sets["train"])

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
            mean, std = self._grey_train().mean_and_std()
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

    def _follow_module(self) -> None:
        """Take options that were not given from the module in the trainer."""
        follow_module(self)
        self.in_channels = self.in_channels or getattr(module_of(self), "in_channels", None)

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

    def _grey_train(self) -> MemoryImages:
        train = self.sets["train"]
        parts = torch.arange(len(train)).split(256)
        grey = torch.cat([to_channels(train.fetch(rows), 1) for rows in parts])
        return MemoryImages(grey, train.labels)


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
