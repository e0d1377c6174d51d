"""Data module of scikit-learn's digits, the default data, which need no download."""

from collections.abc import Mapping
from typing import Any

import torch

from attnkit.tasks.image_classification.augment import Augment, shipped_augment
from attnkit.tasks.image_classification.data import ImageDataModule
from attnkit.tasks.images.sets import ImageSet, MemoryImages


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
