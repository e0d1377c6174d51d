"""Augmentation of batches: drawn for each image, and as torchvision's own would change it."""

import pytest
import torch
from torchvision.transforms import v2
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


BICUBIC = F.InterpolationMode.BICUBIC


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"policy": "randaugment"}, v2.RandAugment(2, 9)),
        ({"randaugment_magnitude": 15, "randaugment_num_ops": 3}, v2.RandAugment(3, 15)),
        ({"policy": "trivial"}, v2.TrivialAugmentWide()),
        ({"policy": "autoaugment"}, v2.AutoAugment()),
        ({"policy": "augmix"}, v2.AugMix()),
        ({"color_jitter": 0.4}, v2.ColorJitter(0.4, 0.4, 0.4)),
        ({"erase_probability": 0.7}, v2.RandomErasing(0.7)),
        ({"crop_min_area": 0.3}, v2.RandomResizedCrop(17, (0.3, 1.0), interpolation=BICUBIC)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_image_is_changed_as_torchvision_would(options, theirs, channels):
    images = F.gaussian_blur(batch(1, 17, channels), [5, 5]).expand(23, -1, -1, -1)
    torch.manual_seed(5)
    changed = Augment(**options)(images)
    torch.manual_seed(5)
    expected = torch.stack([theirs(image) for image in images])
    assert changed.dtype == torch.uint8
    assert torch.equal(changed, expected)
    assert len({image.numpy().tobytes() for image in changed}) > 10


def test_several_come_one_after_the_other():
    images = batch(7, side=16)
    torch.manual_seed(5)
    changed = Augment(policy="trivial", color_jitter=0.2, erase_probability=0.5)(images)
    torch.manual_seed(5)
    for transform in (
        v2.TrivialAugmentWide(),
        v2.ColorJitter(0.2, 0.2, 0.2),
        v2.RandomErasing(0.5),
    ):
        images = torch.stack([transform(image) for image in images])
    assert torch.equal(changed, images)


def test_no_images_are_no_error():
    assert Augment(policy="randaugment", erase_probability=1.0)(batch(0)).shape == (0, 3, 11, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizontal_flip": 1.5}, "horizontal_flip"),
        ({"crop_padding": -1}, "crop_padding"),
        ({"scale": 1}, "scale"),
        ({"crop_min_area": 0}, "crop_min_area"),
        ({"randaugment_magnitude": 31}, "randaugment_magnitude"),
        ({"policy": "rand"}, "policy: expected 'randaugment', 'trivial', 'autoaugment'"),
        ({"randaugment_num_ops": 3}, "randaugment_num_ops: needs policy='randaugment', got None"),
        ({"policy": "trivial", "randaugment_magnitude": 3}, "randaugment_magnitude: needs policy"),
        ({"color_jitter": -1}, "color_jitter"),
        ({"randaugment_num_ops": 0, "randaugment_magnitude": 1}, "randaugment_num_ops"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Augment(**options)
