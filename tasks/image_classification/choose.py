"""Which augmentation suits training pictures, by whether a simple classifier still knows them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as F

from attnkit.tasks.image_classification.augment import LEAST_CROP, Augment, InTurn, random_crop
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.images.sizes import sides

SAMPLE = 1000  # pictures that are looked at
SIDE = 16  # pixels, that they are brought to
KEPT = 0.9  # of what is known above chance, what an augmentation must leave
CROPS = (LEAST_CROP, 0.8)  # smallest shares of the area that are tried, in this order
TENTHS = 10  # that a column of more numbers is cut into
LEAST_SIDE = 48  # pixels, of pictures that are cropped: smaller ones show one thing that fills them


class Known(NamedTuple):
    """Shares of pictures whose class a simple classifier knows, the mean over the classes; of
    several labels or numbers over the classes of each.

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
    def keeps(self) -> bool | None:
        """Whether the augmentation leaves of a picture what tells its class; None: the classifier
        does not know the pictures themselves, so nothing can be said."""
        known = self.as_they_are - self.chance
        if known < 2 * self.margin:
            return None
        return self.changed - self.chance + self.margin >= KEPT * known


class Sample:
    """Some training pictures, small, half of them as examples for the other half.

    A picture has the class of the example that is nearest to it, by the distance of the pixels or
    by that of the edges, whichever knows more. Which pictures these are depends on the set alone.
    Each label is a class or not, and each number is in one of ten classes of about equal size; what
    is unknown of a picture (NaN) counts neither as right nor as wrong.

    Args:
        images: the training set.
    """

    def __init__(self, images: ImageSet) -> None:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:SAMPLE]
        rows = order.sort()  # files are read in their order
        found = images.fetch(rows.values)  # a tensor, or a list of images of their own sizes
        small = torch.cat(
            [
                F.resize(some, [SIDE, SIDE], antialias=True)
                for some in (
                    [image[None] for image in found] if isinstance(found, list) else [found]
                )
            ]
        )
        small, labels = small[rows.indices.argsort()], _classes(images.labels[order])
        half = len(order) // 2
        self.examples, self.example_labels = small[:half], labels[:half]
        self.others, self.labels = small[half:], labels[half:]
        columns = [column[~column.isnan()].unique() for column in self.labels.T]
        self._kinds = [(n, kind) for n, kinds in enumerate(columns) for kind in kinds]
        self.chance = sum(len(kinds) > 0 for kinds in columns) / max(1, len(self._kinds))
        self.margin = max(1, len(self.labels)) ** -0.5
        self._look = max((_pixels, _edges), key=lambda look: self._known(self.others, look))
        self.as_they_are = self._known(self.others, self._look)

    def known_after(self, change: Callable[[Tensor], Tensor]) -> Known:
        """How many are known once they are changed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            changed = self._known(change(self.others), self._look)
        return Known(self.as_they_are, changed, self.chance, self.margin)

    def _known(self, pictures: Tensor, look: Callable[[Tensor], Tensor]) -> float:
        if not len(self.examples):
            return 0.0
        near = torch.cdist(look(pictures), look(self.examples)).argmin(1)
        said = self.example_labels[near]
        told = [said[self.labels[:, n] == kind, n] for n, kind in self._kinds]
        right = [
            (known == kind).double().mean()
            for answers, (_, kind) in zip(told, self._kinds, strict=True)
            if len(known := answers[~answers.isnan()])
        ]
        return float(torch.stack(right).mean()) if right else 0.0


def _classes(labels: Tensor) -> Tensor:
    """Classes [pictures, columns], of the labels, the numbers or the one class of each picture."""
    if not labels.is_floating_point():
        return labels.reshape(len(labels), -1)
    columns = []
    for column in labels.reshape(len(labels), -1).T:
        known = column[~column.isnan()]
        if len(known.unique()) > TENTHS:
            edges = known.quantile(torch.arange(1, TENTHS, dtype=known.dtype) / TENTHS)
            tenths = torch.bucketize(column, edges, right=True).to(column.dtype)
            column = tenths.where(~column.isnan(), column)
        columns.append(column)
    return torch.stack(columns, dim=1)


def _pixels(pictures: Tensor) -> Tensor:
    return pictures.flatten(1).float()


def _edges(pictures: Tensor) -> Tensor:
    """How much neighbours differ, whatever the colours and the contrast."""
    grey = pictures.float().mean(1)
    edges = grey.diff(dim=1)[:, :, 1:].abs() + grey.diff(dim=2)[:, 1:].abs()
    return functional.normalize(edges.flatten(1))


def settle(augment: Augment, images: ImageSet) -> dict[str, Any]:
    """Choose what an augmentation leaves to the training images, and set it there.

    A flip has a probability of 0.5, or 0 where flipped pictures are not known any more; where it
    cannot be said, 0.5 of colour pictures and 0 of grey ones. Random crops keep the first of
    `CROPS` whose crops are known; where none is, there are no crops, nor of pictures of fewer than
    `LEAST_SIDE` pixels; where it cannot be said, they keep the last of `CROPS`.

    Returns:
        what was chosen, by the names of the arguments of `Augment`.
    """
    chosen: dict[str, Any] = {}
    if not augment.is_open:
        return chosen
    sample = Sample(images)
    if augment.horizontal_flip == "auto":
        keeps = sample.known_after(lambda pictures: pictures.flip(-1)).keeps
        chosen["horizontal_flip"] = 0.5 if keeps or (keeps is None and images.channels > 1) else 0.0
    if augment.crop_min_area == "auto":
        chosen["crop_min_area"] = None
        for area in CROPS if min(sides(images.size)) >= LEAST_SIDE else ():
            crop = InTurn(random_crop(area, (SIDE, SIDE), "bilinear"))
            keeps = sample.known_after(crop).keeps
            if keeps or (keeps is None and area == CROPS[-1]):
                chosen["crop_min_area"] = area
                break
    for name, value in chosen.items():
        setattr(augment, name, value)
    return chosen
