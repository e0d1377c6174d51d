"""Training images: random crops of whole pictures, before they are shrunk."""

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
    """Images by the triples (epoch, place, number) of a `PlacedSampler`, fetched by the batch.

    With a crop, every time an image comes up it is another part of its whole picture. Which one
    depends on the seed, the epoch and the place in the epoch alone, whatever the number of
    processes and workers.

    Args:
        images: the set.
        crop: from a picture to one of the size of the images, drawing from torch's generator; None:
            the images as they are.
        seed: of the crops.
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
        """Whether there is work for worker processes."""
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
