"""Training images as random crops of whole pictures."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from attnkit.tasks.images.decode import as_tensor, to_channels
from attnkit.tasks.images.sets import ImageSet

Place = tuple[int, int, int]


class TrainingImages(Dataset):
    """Images fetched by the batch, by the triples (epoch, place, index) of a `PlacedSampler`.

    With a crop, an image is another part of its whole picture each time it is fetched. The part
    depends only on the seed, the epoch and the place in the epoch, for any number of processes and
    workers.

    Args:
        images: the set.
        crop: maps a picture to one of the size of the images and draws from torch's generator;
            None: images are not cropped.
        seed: seed of the crops.
    """

    def __init__(
        self, images: ImageSet, crop: Callable[[Image.Image], Image.Image] | None, seed: int
    ) -> None:
        self.images = images
        self.crop = crop
        self.seed = seed

    @property
    def labels(self) -> Tensor:
        return self.images.labels

    @property
    def reads_files(self) -> bool:
        """Whether fetching takes enough work for worker processes."""
        return self.images.reads_files or self.crop is not None

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        rows = [number for _, _, number in places]
        if self.crop is None:
            return self.images.__getitems__(rows)
        cropped = []
        with torch.random.fork_rng(devices=[]):
            for epoch, place, number in places:
                key = np.random.SeedSequence([self.seed, epoch, place])
                torch.default_generator.manual_seed(int(key.generate_state(1)[0]))
                cropped.append(as_tensor(self.crop(self.images.picture(number))))
        pixels, channels = torch.stack(cropped), self.images.channels
        if pixels.shape[1] != channels:
            pixels = to_channels(pixels, channels)
        return pixels, self.labels[rows]

    def __getitem__(self, place: Place) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([place])
        return images[0], labels[0]
