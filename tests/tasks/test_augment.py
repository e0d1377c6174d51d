"""Augmentation of batches: what is drawn per image, what per group, and that it is right."""

import pytest
import torch
from torchvision.transforms.v2 import functional as F

from attnkit.tasks.image_classification import Augment


def batch(count=24, side=11, channels=3):
    return torch.randint(1, 256, (count, channels, side, side), dtype=torch.uint8)


def test_nothing_is_on_by_default():
    images = batch()
    assert torch.equal(Augment()(images), images)


def test_flip_is_drawn_per_image():
    images = batch(101)
    flipped = Augment(horizontal_flip=0.5)(images)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    kept = (flipped == images).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 25 < mirrored.sum() < 76
    assert torch.equal(Augment(horizontal_flip=1.0)(images), images.flip(-1))


def test_crop_moves_each_image_by_whole_pixels():
    images, pad = batch(37), 2
    cropped = Augment(crop_padding=pad)(images)
    padded = torch.nn.functional.pad(images, (pad,) * 4)
    offsets = set()
    for image, source in zip(cropped, padded, strict=True):
        found = [
            (top, left)
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            if torch.equal(image, source[:, top : top + 11, left : left + 11])
        ]
        assert len(found) == 1
        offsets.update(found)
    assert len(offsets) > 10


def test_affine_agrees_with_torchvision():
    """One rotation, translation and scale, against torchvision's own."""
    augment = Augment(rotate_degrees=20, translate=0.2, scale=0.3)
    image = F.gaussian_blur(batch(1, side=33), [7, 7])
    torch.manual_seed(3)
    moved = augment(image)
    torch.manual_seed(3)
    angle, scale, x, y = (torch.rand(4, 1) * 2 - 1).flatten().tolist()
    # Output pixel p shows input pixel R p / s + t; torchvision is told the inverse.
    factor, degrees = 1 + 0.3 * scale, 20 * angle
    shift = torch.tensor([0.2 * x, 0.2 * y]) * 33
    turn = torch.deg2rad(torch.tensor(degrees))
    rotation = torch.tensor([[turn.cos(), turn.sin()], [-turn.sin(), turn.cos()]])
    back = -(rotation @ shift) * factor
    expected = F.affine(
        image.float(),
        angle=-degrees,
        translate=back.tolist(),
        scale=factor,
        shear=[0.0, 0.0],
        interpolation=F.InterpolationMode.BILINEAR,
    )
    # Away from the border, where the two treat the outside differently.
    assert (moved.float() - expected)[..., 9:24, 9:24].abs().max() < 2
    assert (moved.float() - image.float()).abs().max() > 20


def test_affine_is_drawn_per_image_and_within_bounds():
    images = torch.zeros(64, 1, 21, 21, dtype=torch.uint8)
    images[:, :, 10, 10] = 255
    moved = Augment(translate=2 / 21)(images).float()
    rows = torch.arange(21.0)
    centre = (moved.sum(dim=3).squeeze(1) * rows).sum(1) / moved.flatten(1).sum(1)
    assert centre.unique().numel() > 30
    assert ((centre - 10).abs() <= 2.05).all()
    assert (centre - 10).abs().max() > 1.5


@pytest.mark.parametrize(
    "options",
    [
        {"randaugment_magnitude": 15},
        {"erase_probability": 1.0},
        {"crop_min_area": 0.3},
    ],
)
def test_transforms_of_torchvision_are_drawn_per_group(options):
    one = F.gaussian_blur(batch(1, side=16), [5, 5])
    images = one.expand(40, -1, -1, -1)
    changed = Augment(**options, group_size=5)(images)
    assert changed.dtype == torch.uint8
    assert changed.shape == images.shape
    groups = changed.split(5)
    assert all(torch.equal(group, group[:1].expand(5, -1, -1, -1)) for group in groups)
    assert len({group[0].numpy().tobytes() for group in groups}) > 3


def test_erasing_blackens_a_rectangle():
    images = batch(8, side=16)
    erased = Augment(erase_probability=1.0)(images)
    gone = erased == 0
    assert gone.any()
    assert torch.equal(erased[~gone], images[~gone])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizontal_flip": 1.5}, "horizontal_flip"),
        ({"crop_padding": -1}, "crop_padding"),
        ({"scale": 1}, "scale"),
        ({"crop_min_area": 0}, "crop_min_area"),
        ({"randaugment_magnitude": 31}, "randaugment_magnitude"),
        ({"randaugment_num_ops": 3}, "needs randaugment_magnitude"),
        ({"randaugment_num_ops": 0, "randaugment_magnitude": 1}, "randaugment_num_ops"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Augment(**options)
