"""Augmentation of batches on the training device, drawn for each image."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import InterpolationMode, v2

from attnkit.core.arguments import at_least, choice, share, up_to_1

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
        if policy == "augmix":
            in_turn.append(InTurn(v2.AugMix()))
        elif policy is not None:
            in_turn.append(make_policy(policy, randaugment_magnitude, randaugment_num_ops))
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


def make_policy(name: str, magnitude: int | None, num_ops: int | None) -> nn.Module:
    """Return the policy of this name; `magnitude` and `num_ops` are those of RandAugment."""
    if name == "randaugment":
        return RandAugment(num_ops or 2, 9 if magnitude is None else magnitude)
    if name == "trivial":
        return TrivialAugmentWide()
    return AutoAugment()
