"""What modules of images have in common: pixels are normalised inside, by the training data."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor

from attnkit.tasks.images.sizes import Size, check_fit, checked_size


class NormalizesImages(LightningModule):
    """For a LightningModule of images, whose `__init__` calls `expect_images`.

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
    ) -> None:
        """Set what images are like.

        Args:
            image_size: side in pixels, or [height, width], for those who prepare images to
                predict; None: any.
            in_channels: 1 (grey) or 3 (RGB).
            mean: of the training pixels on the scale from 0 to 1, per channel.
            std: their standard deviation.
            interpolation, crop_pct: how pictures become images: see `Fit`; None: bicubic, and 1.

        Raises:
            ValueError: not a number for each channel, or a deviation that is not positive.
        """
        for name, value in (("mean", mean), ("std", std)):
            if len(value) != in_channels:
                raise ValueError(
                    f"{name}: expected {in_channels} (in_channels) numbers, got {value}"
                )
        if not all(0 < value < math.inf for value in std):
            raise ValueError(f"std: expected positive numbers, got {std}")
        check_fit(interpolation, crop_pct)
        self.image_size = checked_size(image_size)
        self.interpolation = interpolation or "bicubic"
        self.crop_pct = crop_pct or 1.0
        self.in_channels = in_channels
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1))

    def normalized(self, images: Tensor) -> Tensor:
        """(pixel - mean) / std, of uint8 pixels divided by 255 or floats taken as they are."""
        if not images.is_floating_point():
            images = images.to(self.mean.dtype) / 255
        return (images - self.mean) / self.std

    def preprocessing(self) -> dict[str, Any]:
        """What users of exported programs must do to images, as plain data."""
        return {
            "image_size": self.image_size,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "in_channels": self.in_channels,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "inside": "the programs normalise: give them pixels",
        }
