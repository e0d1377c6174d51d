"""Images composed of handwritten digits, so that it is known where each class is seen."""

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

DIGIT = 8  # pixels of a side
# What is known by its colour; well apart, and as bright.
COLOURS = (
    (255, 60, 60), (255, 150, 0), (220, 220, 0), (130, 230, 0), (0, 210, 90),
    (0, 210, 210), (60, 140, 255), (120, 90, 255), (220, 70, 255), (255, 80, 170),
)  # fmt: skip
_DIGIT_FRACTIONS = [0.1, 0.2]  # of the handwriting, for val and test


class Composed(NamedTuple):
    """Pictures of a split, and where in them the classes are.

    images: uint8 [images, 3, side, side].
    labels: int64 [images].
    masks: bool [images, objects, side, side].
    classes: int64 [images, objects], of each mask.
    """

    images: Tensor
    labels: Tensor
    masks: Tensor
    classes: Tensor


class Digits:
    """The handwriting of a split: ink from 0 to 1, [digits, 8, 8], and classes, drawn at random."""

    def __init__(self, ink: Tensor, classes: Tensor, generator: torch.Generator) -> None:
        self.ink, self.classes, self.generator = ink, classes, generator
        self.of_class = [(classes == number).nonzero().flatten() for number in range(10)]

    def draw(self, classes: Tensor) -> Tensor:
        """A digit of each class, [*classes, 8, 8]."""
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
        """`count` rows of `each` different numbers below `end`."""
        return self.uniform(count, end).argsort(dim=1)[:, :each]


class ComposedDigits(ImageDataModule):
    """Pictures made of scikit-learn's digits, and masks of what speaks for a class.

    Each handwritten digit is in one of train, val and test only. Of the seed alone depends what is
    drawn. A subclass says in `compose` what a picture is.

    Args:
        num_train, num_val, num_test: pictures.
        **options: as of `ImageDataModule`. Splits are all made here: no fractions.

    Attributes:
        patch: side of the patches that a model has unless asked for others, in pixels of the
            pictures as they are made: the parts of a picture are then whole patches.
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
        """`count` pictures of a split."""

    def load(self) -> tuple[Mapping[str, ImageSet], list[str]]:
        from sklearn.datasets import load_digits  # half a second that other data need not wait

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
        """The pictures of a split, and where in them each class is; after `setup`."""
        if split not in self._composed:
            raise RuntimeError(f"truth: no split {split!r}; setup() makes {', '.join(self.counts)}")
        composed, fit = self._composed[split], fit_of(self)
        images = fit_images(composed.images, fit, self.in_channels, fitted=False)
        flat = composed.masks.flatten(0, 1)[:, None].to(torch.uint8)
        nearest = fit._replace(interpolation="nearest")
        masks = fit_images(flat, nearest, None, fitted=False)[:, 0].bool()
        return Truth(images, masks.unflatten(0, composed.classes.shape), composed.classes)


def cells_of(count: int, side: int) -> Tensor:
    """The number of the cell that each pixel is in, of `count` × `count` cells."""
    cell = torch.arange(count * side) // side
    return cell[:, None] * count + cell


def in_cells(pictures: Tensor) -> Tensor:
    """Pictures from 0 to 1 in the cells of a square, as bytes.

    Args:
        pictures: [images, cells, channels, side, side], the cells in reading order.
    """
    count = math.isqrt(pictures.shape[1])
    rows = pictures.unflatten(1, (count, count)).permute(0, 3, 1, 4, 2, 5)
    return as_uint8(rows.flatten(4, 5).flatten(2, 3))


def as_uint8(canvas: Tensor) -> Tensor:
    """Pixels from 0 to 1 as bytes."""
    return (canvas * 255).round().clamp(0, 255).to(torch.uint8)
