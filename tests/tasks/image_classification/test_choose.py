"""What is left to the training images: augmentation that follows them."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.transforms.v2 import functional as F

from attnkit.tasks.image_classification import Augment, ImageFolderData
from attnkit.tasks.image_classification.augment import Sample, settle
from attnkit.tasks.images.sets import MemoryImages

DIGITS = load_digits()
AUTO = {"horizontal_flip": "auto", "crop_min_area": "auto"}


def digits(rows=600, side=53):
    images = torch.tensor(DIGITS.images[:rows] * 255 / 16).to(torch.uint8).unsqueeze(1)
    images = F.resize(images, [side, side])
    return MemoryImages(images, torch.tensor(DIGITS.target[:rows]))


def stripes(rows=200):
    """Lying or standing stripes of any phase: flipped and cropped they are what they were."""
    at = torch.arange(60).float()
    phase = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0)) * 6.3
    waves = ((torch.sin(at * 6.3 / 60 + phase) + 1) * 127).to(torch.uint8)
    labels = torch.arange(rows) % 2
    lying, standing = waves.unsqueeze(2).expand(-1, 60, 60), waves.unsqueeze(1).expand(-1, 60, 60)
    images = torch.where(labels.view(-1, 1, 1) == 1, lying, standing).unsqueeze(1)
    return MemoryImages(images.contiguous(), labels)


def test_flipped_digits_are_others_and_half_of_one_is_none():
    augment = Augment(**AUTO, rotate_degrees=5)
    assert settle(augment, digits()) == {"horizontal_flip": 0.0, "crop_min_area": 0.8}
    assert (augment.horizontal_flip, augment.crop_min_area) == (0.0, 0.8)
    assert not augment.is_open


def test_stripes_stay_what_they_are():
    assert settle(Augment(**AUTO), stripes()) == {"horizontal_flip": 0.5, "crop_min_area": 0.5}


def test_colours_do_not_hide_where_something_points():
    """Of wedges of any colour on any other, the pixels say little and the edges much."""
    generator = torch.Generator().manual_seed(0)
    wedge = (torch.arange(20).view(-1, 1) - 10).abs() < torch.arange(20) / 2
    where = torch.stack([wedge, wedge.flip(1)]).repeat(200, 1, 1).unsqueeze(1)
    colours = torch.randint(256, (2, 400, 3, 1, 1), generator=generator, dtype=torch.uint8)
    images = MemoryImages(torch.where(where, *colours), torch.arange(400) % 2)
    assert settle(Augment(**AUTO), images) == {"horizontal_flip": 0.0, "crop_min_area": None}


def valued(images, labels):
    """As a table of several labels or numbers has them."""
    found = MemoryImages(images, torch.zeros(len(images)))
    found.labels = labels
    return found


def test_labels_that_are_unknown_do_not_count():
    """Of each label by itself; one that nobody knows is none."""
    pictures, names = digits(), torch.arange(10)
    labels = (pictures.labels.unsqueeze(1) == names).float()
    whole = Sample(valued(pictures.images, labels))
    assert whole.chance == 0.5
    assert whole.as_they_are > 0.9
    labels[::7, :5], labels[:, 9] = torch.nan, torch.nan
    partly = Sample(valued(pictures.images, labels))
    assert partly.chance == 0.5
    assert partly.as_they_are == pytest.approx(whole.as_they_are, abs=0.03)
    assert settle(Augment(**AUTO), valued(pictures.images, labels)) == {
        "horizontal_flip": 0.0, "crop_min_area": 0.8}  # fmt: skip
    none = Sample(valued(pictures.images, torch.full_like(labels, torch.nan)))
    assert none.known_after(lambda p: p.flip(-1)).keeps is None


@pytest.mark.parametrize(("column", "flip"), [(0, 0.0), (1, 0.5)])
def test_numbers_may_change_with_a_flip(column, flip):
    """Where a spot is from left to right changes, and how far down it is does not."""
    places = torch.randint(40, (600, 2), generator=torch.Generator().manual_seed(0))
    at = torch.arange(40)
    spots = [((at - x).abs() < 6) & ((at - y).abs() < 6).unsqueeze(1) for x, y in places]
    images = torch.stack(spots).to(torch.uint8).mul(255).unsqueeze(1).repeat(1, 3, 1, 1)
    numbers = places[:, column : column + 1].float() - 20
    sample = Sample(valued(images, numbers))
    assert sample.chance == pytest.approx(0.1)
    chosen = settle(Augment(**AUTO), valued(images, numbers))
    assert chosen == {"horizontal_flip": flip, "crop_min_area": None}


@pytest.mark.parametrize(("channels", "flip"), [(1, 0.0), (3, 0.5)])
def test_of_noise_nothing_is_known(channels, flip):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (300, channels, 50, 50), generator=generator, dtype=torch.uint8)
    sample = MemoryImages(images, torch.arange(300) % 5)
    assert settle(Augment(**AUTO), sample) == {"horizontal_flip": flip, "crop_min_area": 0.8}


def test_what_is_given_stays():
    augment = Augment(horizontal_flip=0.3, crop_min_area="auto")
    assert settle(augment, digits()) == {"crop_min_area": 0.8}
    assert augment.horizontal_flip == 0.3
    assert settle(Augment(crop_min_area=0.2), digits()) == {}


def test_the_choice_depends_on_the_images_alone():
    """Not on the random state, which it leaves as it is; nor on the order of reading files."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        sample = Sample(digits())
        found.append(sample.known_after(lambda p: p * (torch.rand(p.shape) > 0.5)))
        assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [2, 3, 11])
def test_of_a_few_pictures_little_is_known(rows):
    """They are augmented as before there was a choice, or less."""
    chosen = settle(Augment(**AUTO), digits(rows))
    assert chosen["horizontal_flip"] in (0.0, 0.5)
    assert chosen["crop_min_area"] in (0.5, 0.8, None)


def test_wrong():
    with pytest.raises(ValueError, match="horizontal_flip: expected"):
        Augment(horizontal_flip="always")
    with pytest.raises(ValueError, match='"auto" is for a data module'):
        Augment(horizontal_flip="auto")(torch.zeros(1, 1, 3, 3, dtype=torch.uint8))


@pytest.fixture
def folder(tmp_path):
    for number in range(200):
        place = tmp_path / "photos" / str(DIGITS.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray((DIGITS.images[number] * 255 / 16).astype(np.uint8))
        pixels.resize((53, 53)).save(place / f"{number:03d}.png")
    return tmp_path / "photos"


def test_files_that_are_not_kept_give_the_same_choice(folder):
    chosen = []
    for memory in (None, 0):
        data = ImageFolderData(folder, memory_gb=memory, num_workers=0)
        data.setup("fit")
        chosen.append(data.chosen)
    assert chosen[0] == chosen[1] == {"augment": {"horizontal_flip": 0.0, "crop_min_area": 0.8}}
