"""`CaptionSet`, a data set of captioned images that is read by the batch."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from attnkit.tasks.captioning.tokenizer import Tokenizer
from attnkit.tasks.images.sets import ImageSet


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
