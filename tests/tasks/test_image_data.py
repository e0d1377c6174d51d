"""The data module: splits, batches, order and augmentation, on real digits."""

from itertools import chain

import pytest
import torch
from lightning import LightningModule
from task_support import quiet
from torch import nn
from torchvision.transforms.v2 import functional as F

from attnkit.lightning import UserError
from attnkit.lightning.resume.sampler import BalancedSampler, UnpaddedSampler, stratified_split
from attnkit.tasks.image_classification import Augment, DigitsData, ImageDataModule, MemoryImages
from attnkit.tasks.images.sizes import default_image_size, default_patch_size


class OwnData(ImageDataModule):
    """What a user writes."""

    def __init__(self, splits, names=("a", "b"), **options):
        super().__init__(**options)
        self.given = splits
        self.names = list(names)

    def load(self):
        return self.given, self.names


class Recorder(LightningModule):
    """A module that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.batches = {"train": [], "val": [], "test": []}

    def _keep(self, split, batch):
        self.batches[split].append([tensor.clone() for tensor in batch])

    def training_step(self, batch, batch_idx):
        self._keep("train", batch)
        torch.rand(3)  # a model draws random numbers, too
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self._keep("val", batch)

    def test_step(self, batch, batch_idx):
        self._keep("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def some_images(count=40, side=6, channels=1):
    # Each image is known by its first pixel.
    images = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8)
    images[:, :, 0, 0] = torch.arange(count, dtype=torch.uint8).unsqueeze(1)
    return MemoryImages(images, torch.arange(count) % 2)


def test_digits_are_described_and_split():
    data = DigitsData()
    data.setup("fit")
    facts = data.describe()
    assert (facts["image_size"], facts["patch_size"], facts["in_channels"]) == (8, 2, 1)
    assert facts["num_classes"] == 10
    assert facts["class_names"] == list("0123456789")
    sizes = {split: len(images) for split, images in data.sets.items()}
    assert sum(sizes.values()) == 1797
    assert abs(sizes["test"] - 0.2 * 1797) < 6
    assert abs(sizes["val"] - 0.1 * 1797) < 6
    pixels = torch.cat([data.sets["train"].fetch(torch.arange(sizes["train"]))]).double() / 255
    assert facts["mean"] == pytest.approx([pixels.mean().item()], abs=1e-12)
    assert facts["std"] == pytest.approx([pixels.std(correction=0).item()], abs=1e-12)


def test_splits_are_disjoint_stratified_and_seeded():
    labels = torch.arange(211) % 7
    parts = stratified_split(labels, [0.1, 0.25], seed=3)
    assert torch.cat(parts).sort().values.tolist() == list(range(211))
    for part, share in zip(parts, (0.65, 0.1, 0.25), strict=True):
        assert (torch.bincount(labels[part]) - share * 211 / 7).abs().max() <= 1.5
    again = stratified_split(labels, [0.1, 0.25], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not torch.equal(parts[1], stratified_split(labels, [0.1, 0.25], seed=4)[1])


def test_small_classes_keep_their_training_images():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    rest, val, test = stratified_split(labels, [0.4, 0.4], seed=0)
    assert labels[rest].unique().tolist() == [0, 1, 2]
    assert labels[val].tolist() == labels[test].tolist() == [0]


def test_memory_images_are_views_of_one_tensor():
    images = some_images()
    part = images.select(torch.tensor([7, 3, 11])).select(torch.tensor([2, 0]))
    assert part.images is images.images
    assert part.fetch(torch.arange(2))[:, 0, 0, 0].tolist() == [11, 7]
    assert part.labels.tolist() == [1, 1]
    image, label = part[1]
    assert (image[0, 0, 0].item(), label.item()) == (7, 1)


def test_training_batches_are_augmented_and_others_are_not(tmp_path):
    data = OwnData(
        {"train": some_images(23), "val": some_images(7), "test": some_images(7)},
        batch_size=8,
        augment=Augment(horizontal_flip=1.0),
    )
    module = Recorder()
    run = quiet(tmp_path, max_epochs=1)
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    sizes = [len(labels) for _, labels in module.batches["train"]]
    assert sizes == [8, 8, 7]
    images, labels = map(torch.cat, zip(*module.batches["train"], strict=True))
    numbers = images[:, 0, 0, -1].tolist()  # mirrored
    assert sorted(numbers) == list(range(23))
    assert labels.tolist() == [number % 2 for number in numbers]
    assert images.dtype == torch.uint8
    for split in ("val", "test"):
        images, _ = map(torch.cat, zip(*module.batches[split], strict=True))
        assert torch.equal(images, data.given[split].images)


def test_everything_random_follows_the_seed(tmp_path):
    def run(seed, global_seed, epochs=2):
        torch.manual_seed(global_seed)
        module = Recorder()
        data = OwnData(
            {"train": some_images_fixed()},
            seed=seed,
            batch_size=8,
            augment={"translate": 0.4, "erase_probability": 0.5, "crop_min_area": 0.5},
        )
        quiet(tmp_path, max_epochs=epochs, limit_val_batches=0).fit(module, datamodule=data)
        return [images for images, _ in module.batches["train"]]

    first, again, other = run(1, 5), run(1, 6), run(2, 5, epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    half = len(first) // 2  # the second epoch is another
    assert not all(torch.equal(a, b) for a, b in zip(first[:half], other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first[:half], first[half:], strict=True))


def some_images_fixed():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 6, 6), dtype=torch.uint8, generator=generator)
    return MemoryImages(images, torch.arange(40) % 2)


def test_augmentation_leaves_the_models_random_numbers_alone(tmp_path):
    def state_after(augment):
        torch.manual_seed(7)
        data = OwnData({"train": some_images_fixed()}, augment=augment)
        quiet(tmp_path, max_epochs=1, limit_val_batches=0).fit(Recorder(), datamodule=data)
        return torch.get_rng_state()

    assert torch.equal(state_after(None), state_after(Augment(translate=0.3)))


def test_images_are_fitted_on_the_way(tmp_path):
    module = Recorder()
    data = OwnData({"train": some_images(30)}, image_size=10, in_channels=3, augment=None)
    quiet(tmp_path, max_epochs=1).fit(module, datamodule=data)
    images, _ = module.batches["train"][0]
    assert images.shape == (22, 3, 10, 10)
    assert torch.equal(images[:, 0], images[:, 2])
    facts = data.describe()
    assert facts["mean"] == [facts["mean"][0]] * 3


def test_sizes_that_are_no_squares_keep_the_shape_of_things(tmp_path):
    module = Recorder()
    options = {"image_size": (12, 8), "interpolation": "bilinear", "augment": None}
    data = OwnData({"train": some_images(30)}, **options)
    quiet(tmp_path, max_epochs=1).fit(module, datamodule=data)
    images, _ = module.batches["val"][0]
    assert images.shape == (4, 1, 12, 8)
    # The middle columns of the square, not the square made narrow.
    wide = F.resize(data.sets["val"].images, [12, 12], F.InterpolationMode.BILINEAR)
    assert torch.equal(images, wide[data.sets["val"].rows][..., 2:10])
    facts = data.describe()
    assert (facts["image_size"], facts["patch_size"]) == ([12, 8], 2)
    assert (facts["interpolation"], facts["crop_pct"]) == ("bilinear", 1.0)
    assert default_patch_size([224, 96]) == 16


def test_crop_pct_leaves_out_the_border(tmp_path):
    module = Recorder()
    data = OwnData({"train": some_images(30, side=8)}, image_size=8, crop_pct=0.5, augment=None)
    quiet(tmp_path, max_epochs=1).fit(module, datamodule=data)
    images, _ = module.batches["val"][0]
    large = F.resize(data.sets["val"].images, [16, 16], F.InterpolationMode.BICUBIC)
    assert torch.equal(images, large[data.sets["val"].rows][..., 4:12, 4:12])


def test_colour_made_grey_is_described_as_grey():
    colours = MemoryImages(torch.zeros(30, 3, 5, 5, dtype=torch.uint8), torch.arange(30) % 2)
    colours.images[:, 0] = 255
    data = OwnData({"train": colours}, in_channels=1)
    data.setup()
    assert data.describe()["mean"] == pytest.approx([76 / 255])


def test_what_was_not_asked_for_follows_the_module(tmp_path):
    module = Recorder()
    module.image_size, module.in_channels, module.interpolation = 7, 3, "nearest"
    data = OwnData({"train": some_images(30)}, augment=None)
    quiet(tmp_path).test(module, datamodule=data, verbose=False)
    assert module.batches["test"][0][0].shape[1:] == (3, 7, 7)
    assert data.interpolation == "nearest"


def test_balanced_sampling_gives_classes_equal_shares(tmp_path):
    images = torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1).expand(-1, 1, 6, 6).contiguous()
    labels = (torch.arange(60) >= 50).long()
    data = OwnData({"train": MemoryImages(images, labels), "val": some_images(9)}, seed=3,
                   sampling="balanced", test_fraction=0.1, batch_size=9, augment=None)  # fmt: skip
    module = Recorder()
    quiet(tmp_path, max_epochs=2).fit(module, datamodule=data)
    epochs = module.batches["train"][:6], module.batches["train"][6:]
    seen = [torch.cat([batch[0][:, 0, 0, 0] for batch in epoch]) for epoch in epochs]
    assert [len(numbers) for numbers in seen] == [54, 54]
    for numbers in seen:
        rare = numbers[numbers >= 50]
        assert len(rare) == 27
        assert set(rare.unique(return_counts=True)[1].tolist()) == {3}  # nine of them, thrice
        assert len(numbers[numbers < 50].unique()) == 27
    assert set(seen[0].tolist()) != set(seen[1].tolist())


def test_balanced_sampling_is_shared_and_goes_on_where_it_stopped():
    data = OwnData({"train": some_images(37)}, seed=3, sampling="balanced")
    data.setup()
    items = data.items("train")

    def places(rank, world, start=0):
        sampler = BalancedSampler(items, world, rank, seed=3)
        sampler.set_epoch(2)
        sampler.start = start
        return list(sampler)

    one, two = places(0, 1), [places(rank, 2) for rank in (0, 1)]
    assert [len(part) for part in two] == [15, 15]
    together = sorted(two[0] + two[1], key=lambda place: place[1])
    assert together[: len(one)] == one
    assert places(1, 2, start=5) == two[1][5:]
    assert isinstance(data.train_dataloader().sampler, BalancedSampler)


def test_drop_last():
    data = OwnData({"train": some_images(30)}, batch_size=7, drop_last=True)
    data.setup()
    assert [len(labels) for _, labels in data.train_dataloader()] == [7, 7, 7]
    assert [len(labels) for _, labels in data.val_dataloader()] == [4]
    data.batch_size = 25
    with pytest.raises(UserError, match=r"data.batch_size: 25 is more than the 2\d training"):
        data.train_dataloader()


def test_unpadded_sampler_shares_without_repeating():
    data = some_images(11)
    parts = [list(UnpaddedSampler(data, 3, rank)) for rank in range(3)]
    assert sorted(chain(*parts)) == list(range(11))
    assert [len(UnpaddedSampler(data, 3, rank)) for rank in range(3)] == [4, 4, 3]


def test_a_few_batches_of_the_test_are_of_all_classes(tmp_path):
    images = some_images(60)
    images.labels = torch.arange(60) // 10  # sorted, as folders are
    splits, names = {"train": some_images(), "val": images, "test": images}, list("abcdef")
    seen = []
    for limit in (2, 2, 1.0):
        module, data = Recorder(), OwnData(splits, names, batch_size=10)
        limits = {"limit_val_batches": limit, "limit_test_batches": limit}
        run = quiet(tmp_path, **limits)
        run.validate(module, datamodule=data, verbose=False)
        run.test(module, datamodule=data, verbose=False)
        labels = [torch.cat([batch[1] for batch in module.batches[s]]) for s in ("val", "test")]
        assert torch.equal(*labels)
        seen.append(labels[0].tolist())
    assert len(seen[0]) == 20
    assert len(set(seen[0])) >= 5
    assert seen[0] == seen[1]
    assert seen[2] == images.labels.tolist()


def test_default_sizes():
    expected = {8: (8, 2), 28: (28, 2), 32: (32, 4), 64: (64, 8), 100: (96, 8), 500: (224, 16)}
    for side, (image, patch) in expected.items():
        assert default_image_size(side) == image
        assert default_patch_size(image) == patch
    for side in range(1, 600):
        image = default_image_size(side)
        patch = default_patch_size(image)
        assert image <= max(side, 4)
        assert image % patch == 0
        assert (image // patch) ** 2 <= 256
    assert (default_patch_size(384), default_patch_size(45), default_patch_size(9)) == (24, 5, 3)
    with pytest.raises(UserError, match=r"image_size: no patch size divides 97 .* 96 would do"):
        default_patch_size(97)


def test_of_few_images_the_patches_are_few():
    """64 at most; of many images, and of sizes that allow no such patch, as ever."""
    expected = {8: 2, 16: 2, 28: 4, 32: 4, 48: 6, 64: 8, 96: 12, 100: 15, 112: 14, 224: 28}
    for side, patch in expected.items():
        image = default_image_size(side) if side != 100 else 120
        assert default_patch_size(image, 6_000) == patch
        assert default_patch_size(image, 50_000) == default_patch_size(image)
    assert default_patch_size([224, 96], 6_000) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 1}, "image_size"),
        ({"image_size": [8, 8, 8]}, "image_size"),
        ({"image_size": [8, 1]}, "image_size"),
        ({"interpolation": "cubic"}, "interpolation: expected 'bicubic', 'bilinear' or 'nearest'"),
        ({"crop_pct": 0}, "crop_pct"),
        ({"in_channels": 2}, "in_channels"),
        ({"sampling": "even"}, "sampling: expected 'balanced', got 'even'"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "sum below 1"),
        ({"seed": -1}, "seed"),
        ({"augment": {"flip": 1}}, "flip"),
        ({"augment": "none"}, "augment"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DigitsData(**options)


def test_bad_sets_are_refused():
    with pytest.raises(UserError, match="two classes"):
        OwnData({"train": some_images()}, names=["a"]).setup()
    with pytest.raises(UserError, match="no train split, only val"):
        OwnData({"val": some_images()}).setup()
    with pytest.raises(UserError, match="too few to take a val split: three of a class"):
        OwnData({"train": some_images(4)}).setup()
    wrong = MemoryImages(some_images(4).images, [0, 1, 2, 3])
    with pytest.raises(UserError, match="test has labels outside 0 to 1"):
        OwnData({"train": some_images(), "test": wrong}).setup()
    with pytest.raises(ValueError, match="expected uint8"):
        MemoryImages(torch.zeros(2, 1, 5, 5), [0, 1])
    with pytest.raises(ValueError, match="expected 4 of them"):
        MemoryImages(some_images(4).images, [0, 1])
