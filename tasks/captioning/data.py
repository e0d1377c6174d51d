"""Data modules for image captioning; users subclass `CaptionDataModule`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from torch import Tensor

from attnkit.core.arguments import at_least, choice
from attnkit.lightning.errors import UserError
from attnkit.lightning.resume.sampler import EpochSampler
from attnkit.tasks.captioning.sets import CaptionSet
from attnkit.tasks.captioning.tokenizer import (
    BPETokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from attnkit.tasks.images.data import SplitImages, check_fits_module, follow_module, module_of
from attnkit.tasks.images.sizes import checked_size
from attnkit.tasks.summary import image_lines, split_line

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

    def split_rows(self, train: CaptionSet, fractions: Sequence[float]) -> list[Tensor]:
        """Split the images at random, from the seed, into the rest and these fractions."""
        counts = [round(fraction * len(train)) for fraction in fractions]
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(train), generator=generator)
        parts = order.split([len(train) - sum(counts), *counts])
        return [rows.sort().values for rows in parts]
