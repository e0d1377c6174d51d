"""Data modules for semantic segmentation; users subclass `SegmentationDataModule`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnkit.core.arguments import at_least, up_to_1
from attnkit.lightning.resume.sampler import PlacedSampler
from attnkit.tasks.images.data import SplitImages, check_fits_module, follow_module, module_of
from attnkit.tasks.images.scan import first_of_equal
from attnkit.tasks.images.sizes import checked_size, default_image_size, default_patch_size, sides
from attnkit.tasks.segmentation.sets import MaskedImages, Pairs, augmented, resized
from attnkit.tasks.summary import image_lines, split_line


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

    def split_rows(self, train: MaskedImages, fractions: Sequence[float]) -> list[Tensor]:
        """Split the pictures at random, from the seed, into the rest and these fractions."""
        counts = [round(fraction * len(train)) for fraction in fractions]
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(self.seed))
        return [p.sort().values for p in order.split([len(train) - sum(counts), *counts])]
