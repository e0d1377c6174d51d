"""Images composed of handwritten digits, with masks of where each class is visible."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from attnkit.core.arguments import at_least, choice, up_to_1
from attnkit.lightning.resume.sampler import stratified_split
from attnkit.tasks.image_classification.data import ImageDataModule, fit_images
from attnkit.tasks.images.sets import ImageSet, MemoryImages, Truth
from attnkit.tasks.images.sizes import fit_of

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


class DigitGrid(ComposedDigits):
    """Grids of n × n digits of different classes, 8 × 8 pixels each: one class in each cell.

    The grid pointing game (Böhle et al., Convolutional dynamic alignment networks, 2021) shows
    grids to a classifier that was trained on single images. Here the classifier is trained on
    grids. Each grid occurs n² times, once with each of its classes as the label. The best answer is
    therefore the same probability for all of them, and the best accuracy is 1/n² (the top-5
    accuracy of a 2 × 2 grid can be 1). An answer is right if the n² likeliest classes are those of
    the grid.

    There is a mask for every cell, with its class. A random map has 1/n² of its mass in a cell, as
    has a Gaussian at the centre of a 2 × 2 grid; the mask itself has all of it.

    Args:
        cells: n, 2 or 3.
        num_train: number of pictures, n² for each grid; so are num_val and num_test.
        **options: arguments of `ComposedDigits`.
    """

    patch = DIGIT

    def __init__(self, *, cells: int = 2, num_train: int = 8000, **options: Any) -> None:
        super().__init__(num_train=num_train, **options)
        if cells not in (2, 3):
            raise ValueError(f"cells: expected 2 or 3 cells a side, got {cells}")
        self.cells = cells

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        each = self.cells**2
        classes = digits.distinct(10, -(-count // each), each)
        cells = digits.draw(classes)[:, :, None].expand(-1, -1, 3, -1, -1)
        masks = cells_of(self.cells, DIGIT) == torch.arange(each)[:, None, None]
        images, every = in_cells(cells), torch.arange(count) // each
        labels = classes.flatten()[:count]
        return Composed(images[every], labels, masks.expand(count, -1, -1, -1), classes[every])


_CELLS = 4  # cells a side, each with at most one digit
_STROKE = 4  # side in pixels of a piece of a digit


class NeedleDigits(ComposedDigits):
    """One coloured digit, whose class is the label, among grey digits and strokes, 32 × 32 pixels.

    Each is in a random cell of 4 × 4, and the grey digits have random classes, so that only the
    8 × 8 pixels of the coloured digit show the class; they are the mask. A random map, or a
    Gaussian at the centre, has 1/16 of its mass there; the mask itself has all of it.

    Args:
        num_distractors: number of grey digits.
        num_strokes: number of pieces of grey strokes, 4 × 4 pixels; at most 15 with the digits.
        **options: arguments of `ComposedDigits`.
    """

    patch = DIGIT

    def __init__(self, *, num_distractors: int = 3, num_strokes: int = 4, **options: Any) -> None:
        super().__init__(**options)
        at_least(0, num_distractors=num_distractors, num_strokes=num_strokes)
        if num_distractors + num_strokes >= _CELLS**2:
            raise ValueError(
                f"num_distractors + num_strokes: expected at most {_CELLS**2 - 1}, got "
                f"{num_distractors} + {num_strokes}"
            )
        self.num_distractors, self.num_strokes = num_distractors, num_strokes

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        each = 1 + self.num_distractors + self.num_strokes
        classes = digits.integers(10, count, each)
        ink = digits.draw(classes)
        ink[:, 1 + self.num_distractors :] *= self._pieces(count, digits)
        tint = (0.5 + 0.5 * digits.uniform(count, each, 1)).float().repeat(1, 1, 3)
        tint[:, 0] = torch.tensor(COLOURS)[digits.integers(len(COLOURS), count)] / 255
        places = digits.distinct(_CELLS**2, count, each)
        cells = torch.zeros(count, _CELLS**2, 3, DIGIT, DIGIT)
        cells[torch.arange(count)[:, None], places] = tint[..., None, None] * ink[:, :, None]
        masks = cells_of(_CELLS, DIGIT) == places[:, :1, None, None]
        return Composed(in_cells(cells), classes[:, 0], masks, classes[:, :1])

    def _pieces(self, count: int, digits: Digits) -> Tensor:
        """Return masks of a random piece of each digit, bool [count, num_strokes, 8, 8]."""
        starts = digits.integers(DIGIT - _STROKE + 1, 2, count, self.num_strokes, 1)
        pixels = torch.arange(DIGIT)
        rows, columns = ((pixels >= starts) & (pixels < starts + _STROKE)).unbind(0)
        return rows[..., :, None] & columns[..., None, :]


SIDE = 16
MARK = 4  # side of the mark in pixels


class PlantedShortcut(ComposedDigits):
    """A grey digit in the middle and a mark of 4 × 4 pixels at the border of 16 × 16 pixels.

    In training and validation the mark has the colour of the label's class with probability
    `strength`, and a random colour otherwise: at 1 a model needs only the mark, at 0 the mark is
    uninformative. In the test its colour is random, unless `test_mark` is "training", so that the
    accuracy shows whether the model uses the digit. `painted` swaps marks: if the answer of a model
    follows, it relies on them.

    The mask is the mark, with the class of its colour. A random map has 1/16 of its mass there, a
    Gaussian at the centre less.

    Args:
        strength: probability, from 0 to 1, that the mark has the colour of the class.
        place: place of the mark: "random" at the border, or the upper left "corner".
        test_mark: colour of the mark in the test: "random", or as in "training".
        **options: arguments of `ComposedDigits`.
    """

    patch = MARK

    def __init__(
        self,
        *,
        strength: float = 1.0,
        place: Literal["random", "corner"] = "random",
        test_mark: Literal["random", "training"] = "random",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        up_to_1(strength=strength)
        choice(("random", "corner"), place=place)
        choice(("random", "training"), test_mark=test_mark)
        self.strength, self.place, self.test_mark = strength, place, test_mark

    def compose(self, split: str, count: int, digits: Digits) -> Composed:
        labels = digits.integers(10, count)
        ink, others = digits.draw(labels), digits.integers(10, count)
        strength = self.strength if split != "test" or self.test_mark == "training" else 0.0
        marks = torch.where(digits.uniform(count) < strength, labels, others)
        border = torch.tensor([0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 14, 15])  # in 4 × 4 cells
        cells = border[digits.integers(len(border), count)]
        if self.place == "corner":
            cells = torch.zeros_like(cells)
        canvas = torch.zeros(count, 3, SIDE, SIDE)
        middle = (SIDE - DIGIT) // 2
        canvas[:, :, middle : middle + DIGIT, middle : middle + DIGIT] = ink[:, None]
        masks = cells_of(SIDE // MARK, MARK) == cells[:, None, None]
        images = as_uint8(canvas)
        return Composed(painted(images, masks, marks), labels, masks[:, None], marks[:, None])


def painted(images: Tensor, masks: Tensor, marks: Tensor) -> Tensor:
    """Return images with marks in the colours of these classes.

    Swapping the mark is an intervention: a model whose answer follows relies on the mark.

    Args:
        images: uint8 [images, 3, height, width].
        masks: bool [images, height, width], the places of the marks.
        marks: int64 [images], the classes.
    """
    colours = torch.tensor(COLOURS, dtype=torch.uint8)[marks][:, :, None, None]
    return torch.where(masks[:, None], colours, images)
