"""Choose augmentation by whether a simple classifier still recognises the changed pictures."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as F

from attnkit.tasks.image_classification.augment import LEAST_CROP, Augment, InTurn, random_crop
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.images.sizes import sides

SAMPLE = 1000  # number of pictures that are classified
SIDE = 16  # side in pixels that they are resized to
KEPT = 0.9  # share of the accuracy above chance that an augmentation must leave
CROPS = (LEAST_CROP, 0.8)  # smallest shares of the area that are tried, in this order
TENTHS = 10  # classes that a column of more distinct numbers is cut into
LEAST_SIDE = 48  # pixels; smaller pictures show one thing that fills them, so they are not cropped


class Known(NamedTuple):
    """Accuracies of a simple classifier, means over the classes; if there are several labels or
    numbers, over the classes of each.

    Attributes:
        as_they_are: accuracy on the pictures themselves.
        changed: accuracy on the augmented pictures.
        chance: accuracy of a guess.
        margin: upper bound of two standard errors of these accuracies.
    """

    as_they_are: float
    changed: float
    chance: float
    margin: float

    @property
    def keeps(self) -> bool | None:
        """Whether the augmentation keeps what identifies the class; None if the classifier does
        not recognise the pictures themselves, which leaves the question open."""
        known = self.as_they_are - self.chance
        if known < 2 * self.margin:
            return None
        return self.changed - self.chance + self.margin >= KEPT * known


class Sample:
    """Nearest-neighbour classifier on a sample of small training pictures.

    One half of the sample are the examples, the other half is classified: a picture gets the class
    of the nearest example, by the distance of the pixels or of the edges, whichever is more
    accurate. The sample depends on the set alone. Each label is a class of its own (has it or not),
    and each number is in one of ten classes of about equal size; an unknown value (NaN) counts
    neither as right nor as wrong.

    Args:
        images: the training set.
    """

    def __init__(self, images: ImageSet) -> None:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:SAMPLE]
        rows = order.sort()  # so that files are read in their order
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
        """Classify the pictures after a change and return the accuracies."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            changed = self._known(change(self.others), self._look)
        return Known(self.as_they_are, changed, self.chance, self.margin)

    def _known(self, pictures: Tensor, look: Callable[[Tensor], Tensor]) -> float:
        if not len(self.examples):
            return 0.0
        near = torch.cdist(look(pictures), look(self.examples)).argmin(1)
        predicted = self.example_labels[near]
        of_kind = [predicted[self.labels[:, n] == kind, n] for n, kind in self._kinds]
        right = [
            (known == kind).double().mean()
            for answers, (_, kind) in zip(of_kind, self._kinds, strict=True)
            if len(known := answers[~answers.isnan()])
        ]
        return float(torch.stack(right).mean()) if right else 0.0


def _classes(labels: Tensor) -> Tensor:
    """Return labels, numbers or the class of each picture as classes, [pictures, columns]."""
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
    """Return the normalised differences of neighbouring pixels, without colour and contrast."""
    grey = pictures.float().mean(1)
    edges = grey.diff(dim=1)[:, :, 1:].abs() + grey.diff(dim=2)[:, 1:].abs()
    return functional.normalize(edges.flatten(1))


def settle(augment: Augment, images: ImageSet) -> dict[str, Any]:
    """Choose the arguments of an augmentation that are "auto", and set them.

    A flip gets the probability 0.5, or 0 if flipped pictures are no longer recognised; if the
    classifier cannot tell, 0.5 for colour pictures and 0 for grey ones. Random crops keep the first
    share of `CROPS` whose crops are still recognised; if there is none, or the pictures have fewer
    than `LEAST_SIDE` pixels a side, there are no crops; if the classifier cannot tell, crops keep
    the last share of `CROPS`.

    Returns:
        the chosen values, by the names of the arguments of `Augment`.
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
