"""Data of image captioning: sets, the base of data modules, which users subclass, and scenes."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from torch import Tensor
from torch.utils.data import Dataset

from attnkit.core.arguments import at_least, choice
from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import EpochSampler
from attnkit.tasks.captioning.grammar import captions_of, words_of_objects
from attnkit.tasks.captioning.tokenizer import (
    BPETokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from attnkit.tasks.images.data import PredictData, SplitImages, check_fits_module, follow_module
from attnkit.tasks.images.scenes import draw, draw_scene, handwriting
from attnkit.tasks.images.sets import ImageSet, MemoryImages, Truth
from attnkit.tasks.images.sizes import checked_size, sides
from attnkit.tasks.loaders import BatchItems, module_of
from attnkit.tasks.summary import image_lines, split_line


class CaptionSet(Dataset):
    """Images with their captions, fetched by the batch.

    A DataLoader calls `__getitems__` with all indices of a batch, or with pairs (epoch, index) from
    an `EpochSampler`; it returns the batch, a dict:

    - `image`: uint8 [batch, channels, size, size], or a list of images of their own sizes;
    - `words`: int64 [batch, max_words]: start, the words of one caption, end, padding. With an
      epoch, the caption is drawn at random and depends only on the seed, the epoch and the index of
      the image; without an epoch it is the first one;
    - `references`: list of lists of str, all captions of each image;
    - the entries of `others`, under their names.

    Args:
        images: the pixels; their labels are not used.
        captions: the captions of each image, at least one.
        others: further entries by name, tensors or lists with one item per image.

    Attributes:
        tokenizer, max_words, seed: how `words` are made from captions; set by the data module.
    """

    tokenizer: Tokenizer
    max_words: int
    seed = 0

    def __init__(
        self,
        images: ImageSet,
        captions: Sequence[Sequence[str]],
        others: Mapping[str, Any] | None = None,
    ) -> None:
        self.images = images
        self.captions = [list(of_one) for of_one in captions]
        self.others = dict(others or {})
        for name, items in (("captions", self.captions), *self.others.items()):
            if len(items) != len(images):
                raise ValueError(f"{name}: expected {len(images)} of them, got {len(items)}")
        if not all(self.captions):
            raise ValueError(f"captions: image {self.captions.index([])} has none")
        self._drawn: tuple[tuple[int, int], Tensor] | None = None

    @property
    def reads_files(self) -> bool:
        return self.images.reads_files

    @property
    def sizes(self) -> Tensor:
        """The number of patches of each image, if images keep their own sizes."""
        return self.images.sizes  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, number: int | tuple[int, int]) -> dict[str, Any]:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int | tuple[int, int]]) -> dict[str, Any]:
        pairs = [n if isinstance(n, tuple) else (None, int(n)) for n in numbers]
        plain = [number for _, number in pairs]
        rows = torch.tensor(plain)
        words = [
            self.tokenizer.pad(self.captions[number][self._which(epoch, number)], self.max_words)
            for epoch, number in pairs
        ]
        return {
            "image": self.images.fetch(rows),
            "words": torch.tensor(words),
            "references": [self.captions[number] for number in plain],
            **{
                name: items[rows] if isinstance(items, Tensor) else [items[n] for n in plain]
                for name, items in self.others.items()
            },
        }

    def keys(self) -> Tensor:
        """See `ImageSet.keys`."""
        return self.images.keys()

    def select(self, rows: Tensor) -> "CaptionSet":
        """Return the part of the set with these indices."""
        part, numbers = copy(self), rows.tolist()
        part.images = self.images.select(rows)
        part.captions = [self.captions[number] for number in numbers]
        part.others = {
            name: items[rows] if isinstance(items, Tensor) else [items[n] for n in numbers]
            for name, items in self.others.items()
        }
        part._drawn = None
        return part

    def _which(self, epoch: int | None, number: int) -> int:
        """Return the index of the caption of an image that is used in an epoch."""
        if epoch is None:
            return 0
        if self._drawn is None or self._drawn[0] != (self.seed, epoch):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shares = torch.rand(len(self), generator=generator, dtype=torch.float64)
            self._drawn = ((self.seed, epoch), shares)
        return int(self._drawn[1][number] * len(self.captions[number]))


MAX_DEFAULT_WORDS = 32


class CaptionDataModule(SplitImages):
    """Captioned images in up to three splits; a subclass reads them in `load()`.

    A batch is the dict that `CaptionSet` returns: `image` uint8 [batch, 3, image_size, image_size],
    `words` int64 [batch, max_words] and `references`, all captions of each image. In training,
    `words` is one caption of each image, drawn anew in every epoch from the seed alone; in
    validation and test it is the first caption. Splits that `load()` does not return are taken from
    train, by image.

    The tokenizer is learned from the training captions, unless the module in the trainer has one:
    its `vocabulary` and `max_words` are then used. Each of several processes reads its own part of
    the data: training images are repeated to make the parts equal, other images never are.

    Args:
        max_words: length of `words`, start and end included; longer captions lose their end, and
            the summary counts them. None: the longest training caption, but 32 at most.
        min_count: how often a word must occur in the training captions to get a number.
        tokenizer: "words", or "bpe", which needs the extra `bpe`.
        bpe_size: with "bpe", the size of the vocabulary; None: 8,000.
        **options: `image_size`, `value_range`, `batch_size`, `num_workers`, `val_fraction`,
            `test_fraction` and `seed`, as in `SplitImages`.

    Raises:
        ValueError: an argument out of range.
        UserError: in `setup`, if no word occurs `min_count` times.
    """

    shuffled = EpochSampler

    def __init__(
        self,
        *,
        max_words: int | None = None,
        min_count: int = 5,
        tokenizer: Literal["words", "bpe"] = "words",
        bpe_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if isinstance(self.image_size, list):
            raise ValueError(f"image_size: expected one number, a square, got {self.image_size}")
        at_least(3, max_words=max_words)
        at_least(1, min_count=min_count)
        at_least(260, bpe_size=bpe_size)
        choice(("words", "bpe"), tokenizer=tokenizer)
        if bpe_size is not None and tokenizer != "bpe":
            raise ValueError("bpe_size: needs tokenizer=bpe")
        self.in_channels = 3
        self.max_words = max_words
        self.min_count = min_count
        self.tokenizer_kind = tokenizer
        self.bpe_size = bpe_size
        self._tokenizer: Tokenizer | None = None

    @abstractmethod
    def load(self) -> Mapping[str, CaptionSet]:
        """Return the sets by split: "train", and if they exist "val" and each of `test_splits`."""

    def setup(self, stage: str | None = None) -> None:
        """Load and split the data and learn the tokenizer, once for all stages.

        The tokenizer of a module that is added to the trainer later replaces the learned one.
        """
        module = module_of(self)
        if not self.is_read(stage):
            follow_module(self)
            self.sets = self.with_missing_splits(self.load())
            if self.image_size is None or not getattr(self, "native", False):
                self.image_size = checked_size(next(iter(self.sets.values())).images.size)
        check_fits_module(self)
        vocabulary = getattr(module, "vocabulary", None)
        if vocabulary is not None:
            self._tokenizer = load_tokenizer(vocabulary)
        elif self._tokenizer is None:
            self._tokenizer = self._learned_tokenizer(self.sets["train"])
        self.max_words = getattr(module, "max_words", None) or self.max_words
        if self.max_words is None:
            self.max_words = min(MAX_DEFAULT_WORDS, max(self._lengths()))
        for images in self.sets.values():
            images.tokenizer, images.max_words = self._tokenizer, self.max_words
            images.seed = self.seed

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, after `setup`."""
        if self._tokenizer is None:
            raise RuntimeError("call setup() before tokenizer")
        return self._tokenizer

    def describe(self) -> dict[str, Any]:
        """Return, after `setup`, the plain values that a model and a captioning module need."""
        mean, std = self.sets["train"].images.mean_and_std() if self.sets else ([], [])
        return {
            "image_size": self.image_size,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "value_range": self.value_range,
            "in_channels": self.in_channels,
            "vocabulary": self.tokenizer.to_dict(),
            "vocabulary_size": len(self.tokenizer),
            "max_words": self.max_words,
            "mean": mean,
            "std": std,
        }

    def summary(self) -> list[str]:
        """Return, after `setup`, a few lines that describe the data."""
        counts = {split: len(images) for split, images in self.sets.items()}
        captions = {s: sum(map(len, images.captions)) for s, images in self.sets.items()}
        found = ", ".join(f"{count:,} {split}" for split, count in captions.items())
        return [
            split_line("images", counts),
            f"  captions: {found}; {len(self.tokenizer):,} words and signs, of at most "
            f"{self.max_words} a caption",
            *self._cut(),
            *["  val is one image: of one image CIDEr is always 0"][: counts.get("val") == 1],
            *image_lines(self.sets["train"].images, self),
        ]

    def _lengths(self) -> list[int]:
        """Return the number of words of each training caption, start and end included."""
        captions = chain.from_iterable(self.sets["train"].captions)
        return [2 + len(self.tokenizer.encode(caption)) for caption in captions]

    def _cut(self) -> list[str]:
        """Return a line about the training captions longer than `max_words`, if there are any."""
        lengths = self._lengths()
        longer = sum(length > (self.max_words or 0) for length in lengths)
        return [
            f"  {longer:,} of {len(lengths):,} training captions are longer and lose their end; "
            f"the longest has {max(lengths):,}: data.max_words={max(lengths)} keeps all"
        ][: bool(longer)]

    def test_dataloader(self) -> EVAL_DATALOADERS:
        loaders = {split: self.loader(split) for split in self.test_splits}
        return loaders if len(loaders) > 1 else loaders[self.test_splits[0]]

    def _learned_tokenizer(self, train: CaptionSet) -> Tokenizer:
        captions = chain.from_iterable(train.captions)
        if self.tokenizer_kind == "bpe":
            return BPETokenizer.build(captions, self.bpe_size or 8000, self.min_count)
        tokenizer = WordTokenizer.build(captions, self.min_count)
        if not tokenizer.words:
            raise UserError(
                f"data.min_count: no word occurs {self.min_count} times in the captions of "
                f"{len(train)} training images; a smaller min_count keeps rarer words"
            )
        return tokenizer


class ScenesData(CaptionDataModule):
    """Two things in a relation, such as "a small red seven left of a large striped blue square".

    A picture shows two of 7 shapes and 10 handwritten digits, in 8 colours, 2 sizes and 4 textures;
    one is left of, above or inside the other. It has five different captions from a grammar of 76
    words. There are two test splits. "test" is drawn as the training scenes are; every scene of
    "compositional" has a kind in a colour that training shows only apart (`HELD_OUT`). The digits
    are scikit-learn's 8 × 8 images (see `DigitsData`), tinted and enlarged; each of them is in only
    one of train, val and the tests.

    Batches of val and test also have `id` (list of str), `scene` (list of `Scene`, plain dicts) and
    `masks`, bool [batch, 2, image_size, image_size]: the visible pixels of the first and second
    object. Scenes and captions depend on the seed alone, on every machine; pixels also depend on
    the version of Pillow.

    Args:
        num_train, num_val, num_test: number of scenes of train, of val, and of each test split.
        image_size: side in pixels, at least 24; None: that of the module in the trainer, or 48.
        min_count: as in `CaptionDataModule`.
        **options: other arguments of `CaptionDataModule`, except fractions: each split is
            generated.
    """

    test_splits = ("test", "compositional")

    def __init__(
        self,
        *,
        num_train: int = 16000,
        num_val: int = 400,
        num_test: int = 500,
        image_size: int | None = None,
        min_count: int = 1,
        **options: Any,
    ) -> None:
        for name in ("val_fraction", "test_fraction"):
            if name in options:
                raise TypeError(
                    f"{name}: scenes are generated, not split; use num_val and num_test"
                )
        for name in ("interpolation", "crop_pct"):
            if options.get(name) is not None:
                raise TypeError(f"{name}: scenes are drawn at image_size, not resized")
        super().__init__(image_size=image_size, min_count=min_count, **options)
        at_least(1, num_train=num_train, num_val=num_val, num_test=num_test)
        at_least(24, image_size=image_size)
        numbers = (num_train, num_val, num_test, num_test)
        self.counts = dict(zip(("train", "val", *self.test_splits), numbers, strict=True))

    def load(self) -> Mapping[str, CaptionSet]:
        side, _ = sides(self.image_size or 48)
        train, val, test = handwriting(self.seed)
        parts = zip(self.counts.items(), (train, val, test, test), strict=True)
        return {
            split: compose(split, count, side, digits, self.seed)
            for (split, count), digits in parts
        }

    def truth(self, split: str = "test") -> Truth:
        """Return, after `setup`, images of val or a test split and the masks of their things."""
        scenes = self.sets.get(split)
        if scenes is None or "masks" not in scenes.others:
            raise RuntimeError(f"truth: {split!r} has no masks; val, test and compositional have")
        everything = scenes.others["scene"]

        def objects_of(image: int, sentence: str) -> list[tuple[int, int]]:
            return words_of_objects(sentence, everything[image])

        images = scenes.images.fetch(torch.arange(len(scenes)))
        return Truth(images, scenes.others["masks"], objects_of=objects_of)


def compose(
    split: str, count: int, side: int, digits: dict[str, np.ndarray], seed: int
) -> CaptionSet:
    """Return `count` scenes, which depend only on the seed and the name of the split."""
    random = Random(f"{seed} {split}")
    images = torch.empty((count, 3, side, side), dtype=torch.uint8)
    masks = torch.empty((count, 2, side, side), dtype=torch.bool)
    scenes, captions = [], []
    for number in range(count):
        scene = draw_scene(random, compositional=split == "compositional")
        scenes.append(scene)
        captions.append(captions_of(scene, random))
        picture = draw(scene, side, digits, random)
        images[number] = torch.from_numpy(picture.image)
        masks[number] = torch.from_numpy(picture.masks)
    # Training reads pixels and words only.
    others = {"id": [f"{split}/{n}" for n in range(count)], "scene": scenes, "masks": masks}
    pixels = MemoryImages(images, torch.zeros(count))
    return CaptionSet(pixels, captions, {} if split == "train" else others)


class CaptionPaths(BatchItems):
    """Wraps a set of images and paths; a batch is a dict of `image` and `path`."""

    def __init__(self, pairs: BatchItems) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)  # type: ignore[arg-type]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        images, paths = self.pairs.__getitems__(numbers)
        return {"image": images, "path": paths}


class CaptionPredictData(PredictData):
    """Images under a folder (at any depth) or one image file, for `Trainer.predict`.

    It differs from `PredictData` only in the form of a batch, which is that of `CaptionPaths`.
    """

    def images_at(self, paths: Sequence[str]) -> CaptionPaths:
        return CaptionPaths(super().images_at(paths))
