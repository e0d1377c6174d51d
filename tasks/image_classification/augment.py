"""Augmentation of batches on the training device, and its automatic choice."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from attnkit.core.arguments import at_least, choice, share, up_to_1
from attnkit.tasks.images.sets import ImageSet
from attnkit.tasks.images.sizes import sides

LEAST_CROP = 0.5  # smallest share of the area that `crop_min_area="auto"` may choose
POLICIES = ("randaugment", "trivial", "autoaugment", "augmix")


class Augment(nn.Module):
    """Random changes of a batch of uint8 images, drawn for each image. All are off by default.

    The changes are applied in the order of the arguments. Those that torchvision defines change a
    batch as its transforms would if they were called with one image after the other.

    Args:
        crop_min_area: smallest share of the area of the picture kept by a random resized crop;
            None: no such crop. `ImageDataModule` crops the whole picture, before it is shrunk.
        horizontal_flip: probability of mirroring left and right. For this and `crop_min_area`,
            "auto" lets `ImageDataModule` choose: it tests whether a simple classifier still
            recognises the changed training pictures. It chooses a probability of 0.5 or 0, and
            crops of at least 0.5 or 0.8, or none.
        crop_padding: pixels of black added on every side before a crop of the old size.
        rotate_degrees: largest angle, to either side.
        translate: largest shift, as a share of the side, in either direction.
        scale: largest change of size, as a share: 0.1 gives factors from 0.9 to 1.1.
        policy: "randaugment" (Cubuk et al., 2020), "trivial" (TrivialAugment, Müller and Hutter,
            2021), "autoaugment" (ImageNet's, Cubuk et al., 2019) or "augmix" (Hendrycks et al.,
            2020), with torchvision's settings.
        randaugment_magnitude: strength 0 to 30 of RandAugment's operations; None: 9. Without a
            `policy` it implies RandAugment.
        randaugment_num_ops: number of RandAugment's operations per image; None: 2.
        color_jitter: largest change of brightness, contrast and saturation, as a share.
        erase_probability: probability of blacking out a random rectangle (random erasing, Zhong et
            al., 2020).

    Shapes: uint8 [batch, channels, height, width] in and out.
    """

    def __init__(
        self,
        *,
        crop_min_area: float | Literal["auto"] | None = None,
        horizontal_flip: float | Literal["auto"] = 0.0,
        crop_padding: int = 0,
        rotate_degrees: float = 0.0,
        translate: float = 0.0,
        scale: float = 0.0,
        policy: str | None = None,
        randaugment_magnitude: int | None = None,
        randaugment_num_ops: int | None = None,
        color_jitter: float = 0.0,
        erase_probability: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("horizontal_flip", horizontal_flip), ("crop_min_area", crop_min_area)):
            if isinstance(value, str):
                choice(("auto",), **{name: value})
        flip = None if isinstance(horizontal_flip, str) else horizontal_flip
        up_to_1(horizontal_flip=flip, erase_probability=erase_probability)
        up_to_1(translate=translate)
        share(scale=scale)
        at_least(0, crop_padding=crop_padding, rotate_degrees=rotate_degrees)
        at_least(0, color_jitter=color_jitter)
        at_least(1, randaugment_num_ops=randaugment_num_ops)
        if policy is not None:
            choice(POLICIES, policy=policy)
        area = crop_min_area
        if area is not None and not isinstance(area, str) and not 0 < area <= 1:
            raise ValueError(f"crop_min_area: expected in (0, 1] or None, got {crop_min_area}")
        if randaugment_magnitude is not None and not 0 <= randaugment_magnitude <= 30:
            raise ValueError(
                f"randaugment_magnitude: expected 0 to 30 or None, got {randaugment_magnitude}"
            )
        given = {
            "randaugment_magnitude": randaugment_magnitude,
            "randaugment_num_ops": randaugment_num_ops,
        }
        if policy is None and randaugment_magnitude is not None:
            policy = "randaugment"
        for name, value in given.items():
            if value is not None and policy != "randaugment":
                raise ValueError(f"{name}: needs policy='randaugment', got {policy!r}")
        self.crop_min_area: Any = crop_min_area
        self.horizontal_flip: Any = horizontal_flip
        self.crop_padding = crop_padding
        self.rotate_degrees = rotate_degrees
        self.translate = translate
        self.scale = scale
        in_turn: list[nn.Module] = []
        if policy == "randaugment":
            magnitude = 9 if randaugment_magnitude is None else randaugment_magnitude
            in_turn.append(RandAugment(randaugment_num_ops or 2, magnitude))
        elif policy is not None:
            in_turn.append(_OTHER_POLICIES[policy]())
        if color_jitter:
            in_turn.append(InTurn(v2.ColorJitter(color_jitter, color_jitter, color_jitter)))
        if erase_probability:
            in_turn.append(InTurn(v2.RandomErasing(erase_probability)))
        self.in_turn = nn.Sequential(*in_turn)

    @property
    def is_open(self) -> bool:
        """Whether an argument is "auto", so that the training images decide."""
        return "auto" in (self.crop_min_area, self.horizontal_flip)

    def forward(self, images: Tensor) -> Tensor:
        """Apply all changes, the random crop included.

        Raises:
            ValueError: an argument is "auto", and no data module has chosen a value yet.
        """
        if self.is_open:
            raise ValueError('augment: "auto" is for a data module, which chooses in setup')
        if self.crop_min_area is not None:
            images = InTurn(random_crop(self.crop_min_area, images.shape[-2:]))(images)
        return self.after_crop(images)

    def after_crop(self, images: Tensor) -> Tensor:
        """Apply the changes that follow the crop to images that are cropped already."""
        if self.horizontal_flip:
            images = self._flip(images)
        if self.crop_padding:
            images = self._crop(images)
        if self.rotate_degrees or self.translate or self.scale:
            images = self._affine(images)
        return self.in_turn(images)

    def _flip(self, images: Tensor) -> Tensor:
        chosen = torch.rand(len(images), 1, 1, 1) < self.horizontal_flip
        return torch.where(chosen.to(images.device), images.flip(-1), images)

    def _crop(self, images: Tensor) -> Tensor:
        count, _, height, width = images.shape
        pad = self.crop_padding
        top, left = torch.randint(2 * pad + 1, (2, count, 1)).to(images.device)
        rows = top + torch.arange(height, device=images.device)
        columns = left + torch.arange(width, device=images.device)
        padded = functional.pad(images, (pad, pad, pad, pad))
        which = torch.arange(count, device=images.device).view(-1, 1, 1)
        # Index tensors on both sides of a slice move the sliced axis to the end.
        cropped = padded[which, :, rows.unsqueeze(2), columns.unsqueeze(1)]
        return cropped.permute(0, 3, 1, 2).contiguous()

    def _affine(self, images: Tensor) -> Tensor:
        uniform = torch.rand(4, len(images)) * 2 - 1
        angle = uniform[0] * (self.rotate_degrees * torch.pi / 180)
        factor = 1 + uniform[1] * self.scale
        # affine_grid maps output to input, hence the inverse; its coordinates span 2 per side.
        shift_x, shift_y = uniform[2:] * (2 * self.translate)
        cos, sin = angle.cos() / factor, angle.sin() / factor
        theta = torch.stack([cos, -sin, shift_x, sin, cos, shift_y], dim=1).view(-1, 2, 3)
        grid = functional.affine_grid(
            theta.to(images.device), list(images.shape), align_corners=False
        )
        moved = functional.grid_sample(images.float(), grid, align_corners=False)
        return moved.round().to(torch.uint8)


def random_crop(
    min_area: float, size: Sequence[int], interpolation: str = "bicubic"
) -> v2.RandomResizedCrop:
    """Return torchvision's random crop to [height, width] of at least `min_area` of the picture.

    The aspect ratio of the crop differs from that of `size` by a factor of up to 4/3.
    """
    height, width = size
    ratio = (3 / 4 * width / height, 4 / 3 * width / height)
    how = InterpolationMode(interpolation)
    return v2.RandomResizedCrop((height, width), (min_area, 1.0), ratio, how)


def shipped_augment(name: str) -> Augment:
    """Return the augmentation of conf/data/<name>.yaml, which `augment="default"` also means."""
    text = files("attnkit.conf").joinpath(f"data/{name}.yaml").read_text(encoding="utf-8")
    node = yaml.safe_load(text)["augment"]
    return Augment(**{key: value for key, value in node.items() if key != "_target_"})


class InTurn(nn.Module):
    """Applies a transform of torchvision to each image of a batch separately."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.transform(image) for image in images]) if len(images) else images


class _PerImage(v2.Transform):
    """Mixin that runs a policy of torchvision on a batch and groups equal operations.

    The result equals that of torchvision's transform called with one image after the other. Its
    own `forward` draws the operations, which are recorded instead of applied; then images that
    get the same operation with the same magnitude are transformed together.
    """

    def _apply_image_or_video_transform(
        self, image: Any, transform_id: str, magnitude: float, *args: Any, **kwargs: Any
    ) -> Any:
        self._drawn.append((transform_id, magnitude))
        return image

    def forward(self, images: Tensor) -> Tensor:
        plans = []
        for image in images:
            self._drawn: list[tuple[str, float]] = []
            super().forward(image)
            plans.append(self._drawn)
        images = images.clone()
        for step in range(max(map(len, plans), default=0)):
            alike: dict[tuple[str, float], list[int]] = defaultdict(list)
            for row, plan in enumerate(plans):
                if step < len(plan) and plan[step][0] != "Identity":
                    alike[plan[step]].append(row)
            for (name, magnitude), rows in alike.items():
                images[rows] = super()._apply_image_or_video_transform(
                    images[rows],
                    name,
                    magnitude,
                    interpolation=self.interpolation,
                    fill=self._fill,
                )
        return images


class RandAugment(_PerImage, v2.RandAugment):
    """Applies `v2.RandAugment` to each image of a batch (Cubuk et al., 2020)."""


class TrivialAugmentWide(_PerImage, v2.TrivialAugmentWide):
    """Applies `v2.TrivialAugmentWide` to each image of a batch (Müller and Hutter, 2021)."""


class AutoAugment(_PerImage, v2.AutoAugment):
    """Applies `v2.AutoAugment` to each image of a batch (Cubuk et al., 2019)."""


_OTHER_POLICIES: dict[str, Callable[[], nn.Module]] = {
    "trivial": TrivialAugmentWide,
    "autoaugment": AutoAugment,
    "augmix": lambda: InTurn(v2.AugMix()),
}


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
