"""Base of the modules of images, which normalise pixels by the training data."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from torch import Tensor

from attnkit.lightning.errors import UserError
from attnkit.tasks.images.decode import PREPARED
from attnkit.tasks.images.files import say_once
from attnkit.tasks.images.sizes import Size, check_fit, checked_size, sides
from attnkit.tasks.loaders import is_limited

if TYPE_CHECKING:
    from attnkit.lightning.export import Program


class NormalizesImages(LightningModule):
    """Mixin for a LightningModule of images; its `__init__` must call `expect_images`.

    Mean and standard deviation are buffers, so that a checkpoint carries its preprocessing.
    """

    mean: Tensor
    std: Tensor

    def expect_images(
        self,
        image_size: Size | None,
        in_channels: int,
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str | None = None,
        crop_pct: float | None = None,
        value_range: Sequence[float] | None = None,
        normalized_by: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Set the properties of the images.

        Args:
            image_size: side in pixels, or [height, width], by which images to predict are prepared;
                None: any size.
            in_channels: 1 (grey) or 3 (RGB).
            mean: mean of the training pixels, scaled to [0, 1], per channel.
            std: standard deviation of the training pixels, per channel.
            interpolation, crop_pct, value_range: how pictures are resized: see `Fit`; None:
                bicubic, 1, and all values of 16 bits.
            normalized_by: `mean` and `std` with which the data module normalises its batches of
                floats, which are then taken as they are; `mean` and `std` above are not used. An
                empty mapping: they are not known, and files cannot be prepared.

        Raises:
            ValueError: the number of values differs from `in_channels`, or a deviation is not
                positive.
        """
        if normalized_by is not None:
            mean, std = [0.0] * in_channels, [1.0] * in_channels
        if normalized_by and set(normalized_by) != {"mean", "std"}:
            raise ValueError(f"normalized_by: expected mean and std, got {dict(normalized_by)}")
        for at, numbers in (("", {"mean": mean, "std": std}), ("normalized_by.", normalized_by)):
            for name, value in (numbers or {}).items():
                if len(value) != in_channels:
                    raise ValueError(
                        f"{at}{name}: expected {in_channels} (in_channels) numbers, got {value}"
                    )
                if name == "std" and not all(0 < number < math.inf for number in value):
                    raise ValueError(f"{at}std: expected positive numbers, got {value}")
        check_fit(interpolation, crop_pct, value_range)
        self.image_size = checked_size(image_size)
        self.interpolation = interpolation or "bicubic"
        self.crop_pct = crop_pct or 1.0
        self.value_range = value_range
        self.normalized_by = normalized_by
        self.in_channels = in_channels
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1))

    def normalized(self, images: Tensor) -> Tensor:
        """Return (pixel - mean) / std of images, or a list of images of different sizes.

        uint8 pixels are divided by 255 first; floats are taken as they are.
        """
        if isinstance(images, list):
            return [self.normalized(image) for image in images]
        return (self.as_floats(images) - self.mean) / self.std

    def as_floats(self, images: Tensor) -> Tensor:
        """Return images as floats, as the data module gives them: in [0, 1] or normalised by it.

        Raises:
            UserError: images are uint8, and the normalisation of the data module is unknown.
        """
        if images.is_floating_point():
            return images
        self.check_prepares()
        images = images.to(self.mean.dtype) / 255
        return self._by_data(images, lambda pixels, mean, std: (pixels - mean) / std)

    def as_pictures(self, floats: Tensor) -> Tensor:
        """Return images of `as_floats` in [0, 1] for display. Normalisation is undone if it is
        known; otherwise the lowest value becomes 0 and the highest 1."""
        if self.normalized_by is None:
            return floats
        if not self.normalized_by:
            low, high = floats.aminmax()
            return (floats - low) / (high - low).clamp_min(1e-12)
        return self._by_data(floats, lambda values, mean, std: values * std + mean).clamp(0, 1)

    def check_prepares(self) -> None:
        """Raise UserError if the normalisation of the data module is unknown."""
        if self.normalized_by is not None and not self.normalized_by:
            raise UserError(
                "module.normalized_by: the data module normalised the images of the training "
                "itself, and how is not known\n"
                "  module.normalized_by='{mean:[0.5],std:[0.5]}' says it, a number per channel of "
                "pixels from 0 to 1;\n"
                "  in training, the data module's describe() may: normalized_by"
            )

    def _by_data(self, images: Tensor, change: Callable[..., Tensor]) -> Tensor:
        if not self.normalized_by:
            return images
        by = (images.new_tensor(self.normalized_by[name]) for name in ("mean", "std"))
        return change(images, *(numbers.view(-1, 1, 1) for numbers in by))

    def program(self, output: str, shape: Sequence[Any], meaning: str) -> dict[str, "Program"]:
        """Return the program to export: `model` maps uint8 images of one size to the result of
        `forward`.

        Args:
            output: name of the result.
            shape: its shape without the batch.
            meaning: what the result is, for users of the program.
        """
        from attnkit.lightning.export import Program  # few need it

        assert self.image_size is not None
        size = (self.in_channels, *sides(self.image_size))
        return {
            "model": Program(
                self,
                lambda batch: {"images": torch.randint(0, 256, (batch, *size), dtype=torch.uint8)},
                {"images": ("batch", *size)},
                (output, ("batch", *shape)),
                {"images": PREPARED, output: meaning},
            )
        }

    def on_test_start(self) -> None:
        """Print how many images are tested, unless the data module does."""
        loaders: Any = self.trainer.test_dataloaders
        if hasattr(getattr(self.trainer, "datamodule", None), "choose_tested"):
            return
        for name, loader in (loaders if isinstance(loaders, dict) else {"test": loaders}).items():
            with suppress(AttributeError, TypeError):  # several loaders, or one without a length
                say_tested(self.trainer, name, len(loader.dataset))

    def preprocessing(self) -> dict[str, Any]:
        """Return the preprocessing that exported programs expect, as plain data."""
        return {
            "image_size": self.image_size,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "value_range": self.value_range,
            "in_channels": self.in_channels,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            **(self.normalized_by or {}),
            "inside": "the programs normalise: give them pixels"
            if self.normalized_by != {}
            else "not known: the data module of the training normalised",
        }


def say_tested(trainer: Any, split: str, count: int, how: str = "") -> None:
    """Print how many images a test uses; `how` describes which."""
    if is_limited(trainer, "test"):
        how += f"; trainer.limit_test_batches={trainer.limit_test_batches} of the batches"
    say_once(f"{split}: {count:,} images{how}")
