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

    Splits that `load()` does not give are taken from train, stratified by class. A batch is uint8
    images [batch, channels, height, width] and int64 labels [batch]; images are brought to
    `image_size` and `in_channels`, and in training augmented, after the transfer to the device;
    only random crops come first, of the whole pictures. What the augmentation draws depends on the
    seed, the step and the process, and on nothing else.

    Args:
        in_channels: 1 (grey) or 3 (RGB); None: as the module's, else as the training images.
        augment: `Augment` or any module on uint8 batches; a mapping is what `Augment` takes; None
            for none; "default" for what suits these images.
        sampling: "balanced": every class gets the same share of an epoch (see `BalancedSampler`);
            None: every training image comes up once.
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
    """What is learned; of "labels" and "numbers" the sets' labels are float32 [images, outputs]."""
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
        """What was left to the training images, by argument: of `augment`, its own arguments."""

    @abstractmethod
    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        """The splits there are ("train" and maybe "val" and "test") and the class names."""

    def default_augment(self) -> nn.Module | None:
        """What `augment="default"` means for these images."""
        return None

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once; all stages need the training images' size, mean and deviation,
        but the test of a trained module, which may be of other images."""
        if not self.is_read(stage):
            self._read()
        check_fits_module(self)  # of a trainer that may have come later

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
        """The image size where none is given and the module has none."""
        return default_image_size(min(sides(images.size)))

    @property
    def train_labels(self) -> Tensor:
        """The classes of the training images, after `setup`."""
        return self.sets["train"].labels

    def describe(self) -> dict[str, Any]:
        """What a model and `ImageClassification` need to know; plain values, after `setup`."""
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
        """What was found, in a few lines; after `setup`."""
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
        """That of the augmentation: training images are then crops of whole pictures."""
        return self.augment.crop_min_area if isinstance(self.augment, Augment) else None

    @property
    def kept_crop_area(self) -> float | None:
        """The smallest crop that whole pictures are kept for, known before they are read: the same
        whichever is chosen, so that a run that goes on reads the same pixels."""
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
        if isinstance(batch, Tensor):  # the module's example, of Lightning's summary
            return batch
        images, *rest = batch
        training = self.trainer is not None and self.trainer.training
        cropped = training and self.crop_min_area is not None
        images = self.fitted_images(images, cropped=cropped)
        if self.augment is not None and self.trainer is not None and training:
            # Its own seed per step and process: what is drawn depends on nothing else, and the
            # model's random numbers do not depend on the augmentation.
            step = self.trainer.fit_loop.total_batch_idx + 1
            key = np.random.SeedSequence([self.seed, self.trainer.global_rank, step])
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int(key.generate_state(1)[0]))
                images = self.augmented(images, cropped=cropped)
        return (images, *rest)

    def fitted_images(self, images: Any, *, cropped: bool) -> Any:
        """The images of a batch at the size and with the channels that the module takes."""
        fitted = cropped or next(iter(self.sets.values())).fitted
        return fit_images(images, fit_of(self), self.in_channels, fitted=fitted)

    def augmented(self, images: Any, *, cropped: bool) -> Any:
        """Training images, changed at random; where they are cropped already, by the rest of it."""
        if cropped and isinstance(self.augment, Augment):
            return self.augment.after_crop(images)
        return self.augment(images) if self.augment is not None else images

    def _follow_module(self) -> None:
        """What was not asked for is what the module in the trainer was made for."""
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
        """About these fractions of every class; nothing of a class of one or two images."""
        return stratified_split(train.labels, fractions, self.seed)

    def _grey_train(self) -> MemoryImages:
        train = self.sets["train"]
        parts = torch.arange(len(train)).split(256)
        grey = torch.cat([to_channels(train.fetch(rows), 1) for rows in parts])
        return MemoryImages(grey, train.labels)


def fit_images(images: Tensor, fit: Fit, channels: int | None, *, fitted: bool) -> Tensor:
    """A uint8 batch at another size and number of channels.

    Args:
        images: [batch, channels, height, width].
        fit: the size, and how it is reached.
        channels: 1 or 3; None leaves those that there are.
        fitted: whether images of that size are ready.
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
