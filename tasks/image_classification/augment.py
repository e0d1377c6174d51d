"""Augmentation of whole batches, on the device they are trained on."""

from importlib.resources import files

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

from attnkit.lightning.arguments import at_least, shares, shares_below_1


class Augment(nn.Module):
    """Random changes of a batch of square uint8 images. All are off by default.

    Flips, shifted crops, rotation, translation and scale are drawn for every image. The transforms
    of torchvision (RandomResizedCrop, RandAugment, RandomErasing) draw once per call, so they are
    called with groups of `group_size` images.

    Args:
        horizontal_flip: probability of mirroring left and right.
        crop_padding: pixels of black added on every side before a crop of the old size.
        rotate_degrees: largest angle, to either side.
        translate: largest shift, as a share of the side, in either direction.
        scale: largest change of size, as a share: 0.1 gives factors from 0.9 to 1.1.
        crop_min_area: smallest share of the area kept by a random resized crop; None: no such crop.
        randaugment_magnitude: strength 0 to 30 of RandAugment's operations; None: no RandAugment.
        randaugment_num_ops: operations one after the other; 2 unless given.
        erase_probability: of blacking out a random rectangle.
        group_size: images that share one draw of torchvision's transforms.

    Shapes: uint8 [batch, channels, side, side] in and out.
    Sources: RandAugment, Cubuk et al., 2020; random erasing, Zhong et al., 2020. Differs from both
    in the draw per group.
    """

    def __init__(
        self,
        *,
        horizontal_flip: float = 0.0,
        crop_padding: int = 0,
        rotate_degrees: float = 0.0,
        translate: float = 0.0,
        scale: float = 0.0,
        crop_min_area: float | None = None,
        randaugment_magnitude: int | None = None,
        randaugment_num_ops: int | None = None,
        erase_probability: float = 0.0,
        group_size: int = 8,
    ) -> None:
        super().__init__()
        shares(horizontal_flip=horizontal_flip, erase_probability=erase_probability)
        shares(translate=translate)
        shares_below_1(scale=scale)
        at_least(0, crop_padding=crop_padding, rotate_degrees=rotate_degrees)
        at_least(1, randaugment_num_ops=randaugment_num_ops, group_size=group_size)
        if crop_min_area is not None and not 0 < crop_min_area <= 1:
            raise ValueError(f"crop_min_area: expected in (0, 1] or None, got {crop_min_area}")
        if randaugment_magnitude is not None and not 0 <= randaugment_magnitude <= 30:
            raise ValueError(
                f"randaugment_magnitude: expected 0 to 30 or None, got {randaugment_magnitude}"
            )
        if randaugment_num_ops is not None and randaugment_magnitude is None:
            raise ValueError("randaugment_num_ops: needs randaugment_magnitude, which is None")
        self.horizontal_flip = horizontal_flip
        self.crop_padding = crop_padding
        self.rotate_degrees = rotate_degrees
        self.translate = translate
        self.scale = scale
        self.crop_min_area = crop_min_area
        self.erase_probability = erase_probability
        self.group_size = group_size
        self.randaugment: nn.Module | None = None
        if randaugment_magnitude is not None:
            self.randaugment = v2.RandAugment(randaugment_num_ops or 2, randaugment_magnitude)

    def forward(self, images: Tensor) -> Tensor:
        if self.horizontal_flip:
            images = self._flip(images)
        if self.crop_padding:
            images = self._crop(images)
        if self.rotate_degrees or self.translate or self.scale:
            images = self._affine(images)
        transforms: list[nn.Module] = []
        if self.crop_min_area is not None:
            transforms.append(
                v2.RandomResizedCrop(list(images.shape[-2:]), (self.crop_min_area, 1.0))
            )
        if self.randaugment is not None:
            transforms.append(self.randaugment)
        if self.erase_probability:
            transforms.append(v2.RandomErasing(self.erase_probability))
        if not transforms:
            return images
        in_turn = v2.Compose(transforms)
        return torch.cat([in_turn(group) for group in images.split(self.group_size)])

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
        # Indices around a slice put the sliced axis last.
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


def shipped_augment(name: str) -> Augment:
    """The augmentation in conf/data/<name>.yaml, which is also that of `augment="default"`."""
    text = files("attnkit.conf").joinpath(f"data/{name}.yaml").read_text(encoding="utf-8")
    node = yaml.safe_load(text)["augment"]
    return Augment(**{key: value for key, value in node.items() if key != "_target_"})
