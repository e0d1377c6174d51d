"""Which augmentation suits training pictures, by whether a simple classifier still knows them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from attnkit.tasks.image_classification.augment import LEAST_CROP, Augment, InTurn, random_crop
from attnkit.tasks.images.sets import ImageSet

SAMPLE = 1000  # pictures that are looked at
SIDE = 16  # pixels, that they are brought to
KEPT = 0.9  # of what is known above chance, what an augmentation must leave
CROPS = (LEAST_CROP, 0.8)  # smallest shares of the area that are tried, in this order


class Known(NamedTuple):
    """Shares of pictures whose class a simple classifier knows, the mean over the classes.

    Attributes:
        as_they_are: of the pictures themselves.
        changed: of what an augmentation makes of them.
        chance: of one that knows nothing.
        margin: two standard errors of such a share, at most.
    """

    as_they_are: float
    changed: float
    chance: float
    margin: float

    @property
    def keeps(self) -> bool:
        """Whether the augmentation leaves of a picture what tells its class."""
        left = self.changed - self.chance + self.margin
        return left >= KEPT * (self.as_they_are - self.chance)


class Sample:
    """Some training pictures, small, half of them as examples for the other half.

    A picture has the class of the example that is nearest to it, by the distance of the pixels.
    Which pictures these are depends on the set alone.

    Args:
        images: the training set.
    """

    def __init__(self, images: ImageSet) -> None:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:SAMPLE]
        labels = images.labels[order]
        small = F.resize(images.fetch(order.sort().values), [SIDE, SIDE], antialias=True)
        small = small[order.argsort().argsort()]  # files are read in their order
        half = len(order) // 2
        self.examples, self.example_labels = small[:half], labels[:half]
        self.others, self.labels = small[half:], labels[half:]
        self.chance = 1 / max(1, len(self.labels.unique()))
        self.as_they_are = self._known(self.others)

    def known_after(self, change: Callable[[Tensor], Tensor]) -> Known:
        """How many are known once they are changed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            changed = change(self.others)
        return Known(
            self.as_they_are, self._known(changed), self.chance, max(1, len(changed)) ** -0.5
        )

    def _known(self, pictures: Tensor) -> float:
        if not len(self.examples):
            return 0.0
        near = torch.cdist(pictures.flatten(1).float(), self.examples.flatten(1).float()).argmin(1)
        right = (self.example_labels[near] == self.labels).double()
        classes = [right[self.labels == label].mean() for label in self.labels.unique()]
        return float(torch.stack(classes).mean())


def settle(augment: Augment, images: ImageSet) -> dict[str, Any]:
    """Choose what an augmentation leaves to the training images, and set it there.

    A flip has a probability of 0.5, or 0 where flipped pictures are not known any more. Random
    crops keep the first of `CROPS` whose crops are known; where none is, there are no crops.

    Returns:
        what was chosen, by the names of the arguments of `Augment`.
    """
    chosen: dict[str, Any] = {}
    if not augment.is_open:
        return chosen
    sample = Sample(images)
    if augment.horizontal_flip == "auto":
        flipped = sample.known_after(lambda pictures: pictures.flip(-1))
        chosen["horizontal_flip"] = 0.5 if flipped.keeps else 0.0
    if augment.crop_min_area == "auto":
        crops = {area: InTurn(random_crop(area, (SIDE, SIDE), "bilinear")) for area in CROPS}
        kept = (area for area, crop in crops.items() if sample.known_after(crop).keeps)
        chosen["crop_min_area"] = next(kept, None)
    for name, value in chosen.items():
        setattr(augment, name, value)
    return chosen
