"""The default data: scikit-learn's digits, which need no network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from attnkit.tasks.image_classification.augment import Augment
from attnkit.tasks.image_classification.data import AugmentArgument, ImageDataModule
from attnkit.tasks.image_classification.sets import ImageSet, MemoryImages


class DigitsData(ImageDataModule):
    """scikit-learn's 1,797 handwritten digits, grey, 8 × 8 pixels; comes with the library.

    Source: UCI, Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), the part
    that scikit-learn ships. Arguments as in `ImageDataModule`.
    """

    def __init__(
        self,
        *,
        image_size: int | None = None,
        in_channels: int | None = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int = 0,
        augment: AugmentArgument = "default",
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            image_size=image_size,
            in_channels=in_channels,
            batch_size=batch_size,
            num_workers=num_workers,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            seed=seed,
            augment=augment,
            drop_last=drop_last,
        )

    def default_augment(self) -> nn.Module:
        return Augment(rotate_degrees=5, translate=0.06, scale=0.05)

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        from sklearn.datasets import load_digits  # half a second that other data need not wait

        digits = load_digits()
        # 17 grey values, 0 to 16.
        images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)
        labels = torch.from_numpy(digits.target)
        return {"train": MemoryImages(images.unsqueeze(1), labels)}, [str(d) for d in range(10)]
