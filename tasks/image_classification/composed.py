"""Images composed of handwritten digits, with masks of where each class is visible."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.lightning.resume.sampler import stratified_split
from attnkit.tasks.image_classification.data import ImageDataModule, fit_images
from attnkit.tasks.images.data import fit_of
from attnkit.tasks.images.sets import ImageSet, MemoryImages
from attnkit.tasks.images.truth import Truth

DIGIT = 8  # side of a digit in pixels
# One colour per class: easy to tell apart and about equally bright.
COLOURS = (
    (255, 60, 60), (255, 150, 0), (220, 220, 0), (130, 230, 0), (0, 210, 90),
    (0, 210, 210), (60, 140, 255), (120, 90, 255), (220, 70, 255), (255, 80, 170),
)  # fmt: skip
_DIGIT_FRACTIONS = [0.1, 0.2]  # shares of the handwritten digits in val and test


class Composed(NamedTuple):
    """Pictures of a split and the masks of the classes in them.

    images: uint8 [images, 3, side, side].
    labels: int64 [images].
    masks: bool [images, objects, side, side].
    classes: int64 [images, objects], the class of each mask.
    """

    images: Tensor
    labels: Tensor
    masks: Tensor
    classes: Tensor


class Digits:
    """Draws random handwritten digits of a split: ink from 0 to 1, [digits, 8, 8], and classes."""

    def __init__(self, ink: Tensor, classes: Tensor, generator: torch.Generator) -> None:
        self.ink, self.classes, self.generator = ink, classes, generator
        self.of_class = [(classes == number).nonzero().flatten() for number in range(10)]

    def draw(self, classes: Tensor) -> Tensor:
        """Return a random digit of each class, [*classes, 8, 8]."""
        numbers = [
            rows[int(self.uniform(1) * len(rows))]
            for rows in (self.of_class[number] for number in classes.flatten().tolist())
        ]
        return self.ink[torch.stack(numbers)].unflatten(0, classes.shape)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)

    def distinct(self, end: int, count: int, each: int) -> Tensor:
        """Return `count` rows of `each` distinct random numbers below `end`."""
        return self.uniform(count, end).argsort(dim=1)[:, :each]


class ComposedDigits(ImageDataModule):
    """Base of data modules of pictures made of scikit-learn's digits, with masks of the evidence.

    Each handwritten digit is in only one of train, val and test. The pictures depend on the seed
    alone. A subclass makes them in `compose`.

    Args:
        num_train, num_val, num_test: number of pictures of each split.
        **options: arguments of `ImageDataModule`, except fractions: each split is generated.

    Attributes:
        patch: the default patch side of a model, in pixels of the generated pictures, so that the
            parts of a picture are whole patches.
    """

    patch: int

    def __init__(
        self, *, num_train: int = 3000, num_val: int = 500, num_test: int = 500, **options: Any
    ) -> None:
        for name in ("val_fraction", "test_fraction"):
            if name in options:
                raise TypeError(
                    f"{name}: these images are generated, not split; use num_val and num_test"
                )
        super().__init__(**options)
        at_least(1, num_train=num_train, num_val=num_val, num_test=num_test)
        self.counts = {"train": num_train, "val": num_val, "test": num_test}
        self._composed: dict[str, Composed] = {}

    @abstractmethod
    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        """Return `count` pictures of a split, made of these digits."""

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        from sklearn.datasets import load_digits  # takes half a second, which only this data needs

        found = load_digits()
        ink, classes = torch.from_numpy(found.images / 16).float(), torch.from_numpy(found.target)
        parts = stratified_split(classes, _DIGIT_FRACTIONS, self.seed)
        for (split, count), rows in zip(self.counts.items(), parts, strict=True):
            generator = torch.Generator().manual_seed(self.seed * 2**32 + crc32(split.encode()))
            digits = Digits(ink[rows], classes[rows], generator)
            self._composed[split] = self.compose(split, count, digits)
        sets = {name: MemoryImages(one.images, one.labels) for name, one in self._composed.items()}
        return sets, [str(number) for number in range(10)]

    def describe(self) -> dict[str, Any]:
        facts = super().describe()
        own = self.sets["train"].size == facts["image_size"]
        return facts | {"patch_size": self.patch} if own else facts

    def truth(self, split: str = "test") -> Truth:
        """Return, after `setup`, the pictures of a split and the masks of the classes in them."""
        if split not in self._composed:
            raise RuntimeError(f"truth: no split {split!r}; setup() makes {', '.join(self.counts)}")
        composed, fit = self._composed[split], fit_of(self)
        images = fit_images(composed.images, fit, self.in_channels, fitted=False)
        flat = composed.masks.flatten(0, 1)[:, None].to(torch.uint8)
        nearest = fit._replace(interpolation="nearest")
        masks = fit_images(flat, nearest, None, fitted=False)[:, 0].bool()
        return Truth(images, masks.unflatten(0, composed.classes.shape), composed.classes)


def cells_of(count: int, side: int) -> Tensor:
    """Return the index of the cell of each pixel, for `count` × `count` cells."""
    cell = torch.arange(count * side) // side
    return cell[:, None] * count + cell


def in_cells(pictures: Tensor) -> Tensor:
    """Arrange pictures in [0, 1] in the cells of a square, as uint8.

    Args:
        pictures: [images, cells, channels, side, side], the cells in reading order.
    """
    count = math.isqrt(pictures.shape[1])
    rows = pictures.unflatten(1, (count, count)).permute(0, 3, 1, 4, 2, 5)
    return as_uint8(rows.flatten(4, 5).flatten(2, 3))


def as_uint8(canvas: Tensor) -> Tensor:
    """Convert pixels in [0, 1] to uint8."""
    return (canvas * 255).round().clamp(0, 255).to(torch.uint8)
