"""Folders of real files: layouts, broken files, memory and disk, and nothing written."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from attnkit.lightning import ExactResume, RunError, UserError
from attnkit.lightning.resume.sampler import PlacedSampler
from attnkit.tasks.image_classification import (
    FileImages,
    ImageClassification,
    ImageFolderData,
    MemoryImages,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def make_images(folder, counts, side=11, suffix=".png", grey=False, first=0):
    """Noise in class folders: `counts` maps a class to its number of images."""
    random = np.random.default_rng(first)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            shape = (side, side + number % 3) if grey else (side, side + number % 3, 3)
            pixels = random.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03}{suffix}")
    return folder


def ready(root, **options):
    data = ImageFolderData(root, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def pixels_of(data, split):
    images = data.sets[split]
    return images.fetch(torch.arange(len(images)))


def test_class_folders_alone_are_split(tmp_path):
    make_images(tmp_path, {"cat": 20, "Dog": 10, "ant": 10})
    data = ready(tmp_path)
    assert data.class_names == ["Dog", "ant", "cat"]  # as ImageFolder sorts them
    assert {split: len(images) for split, images in data.sets.items()} == {
        "train": 32,
        "val": 4,
        "test": 4,
    }
    assert torch.bincount(data.sets["val"].labels).tolist() == [1, 1, 2]
    seen = {image.numpy().tobytes() for split in data.sets for image in pixels_of(data, split)}
    assert len(seen) == 40  # disjoint


@pytest.mark.parametrize(
    "names", [("training", "valid", "testing"), ("TRAIN", "Validation", "eval"),
              ("train", "dev", "evaluation")]
)  # fmt: skip
def test_given_splits_are_used(tmp_path, names):
    for number, name in enumerate(names):
        make_images(tmp_path / name, {"a": 3 + number, "b": 5}, first=100 * number)
    data = ready(tmp_path)
    assert {split: len(images) for split, images in data.sets.items()} == {
        "train": 8, "val": 9, "test": 10,
    }  # fmt: skip


def test_a_missing_split_is_taken_from_train(tmp_path):
    make_images(tmp_path / "train", {"a": 20, "b": 20})
    make_images(tmp_path / "test", {"a": 3, "b": 3}, first=100)
    data = ready(tmp_path, val_fraction=0.25, seed=5)
    assert [len(images) for images in data.sets.values()] == [30, 10, 6]
    again = ready(tmp_path, val_fraction=0.25, seed=5)
    assert torch.equal(pixels_of(data, "val"), pixels_of(again, "val"))
    other = ready(tmp_path, val_fraction=0.25, seed=6)
    assert not torch.equal(pixels_of(data, "val"), pixels_of(other, "val"))


def test_a_class_may_be_called_train(tmp_path):
    make_images(tmp_path, {"train": 10, "tram": 10})
    assert ready(tmp_path).class_names == ["train", "tram"]


def test_sizes_and_channels_come_from_the_images(tmp_path):
    make_images(tmp_path / "grey", {"a": 10, "b": 10}, side=35, grey=True)
    facts = ready(tmp_path / "grey").describe()
    assert (facts["image_size"], facts["patch_size"], facts["in_channels"]) == (32, 4, 1)
    make_images(tmp_path / "mixed", {"a": 9, "b": 10}, side=35, grey=True)
    make_images(tmp_path / "mixed", {"a": 1}, side=500, first=50)
    facts = ready(tmp_path / "mixed").describe()
    assert (facts["image_size"], facts["in_channels"]) == (32, 3)
    assert ready(tmp_path / "mixed", image_size=14, in_channels=1).describe()["in_channels"] == 1


def test_grey_training_images_make_the_others_grey(tmp_path):
    make_images(tmp_path / "train", {"a": 5, "b": 5}, grey=True)
    make_images(tmp_path / "val", {"a": 2, "b": 2}, first=50)
    make_images(tmp_path / "test", {"a": 2, "b": 2}, first=70)
    for memory_gb in (None, 0):
        assert pixels_of(ready(tmp_path, memory_gb=memory_gb), "val").shape[1] == 1


def test_memory_and_disk_give_the_same(tmp_path):
    make_images(tmp_path, {"a": 20, "b": 21}, suffix=".jpg", side=23)
    (tmp_path / "a" / "zero.png").write_bytes(b"")
    options = {"image_size": 9, "seed": 3, "skip_corrupt": True}
    memory, disk = ready(tmp_path, **options), ready(tmp_path, **options, memory_gb=0)
    assert isinstance(memory.sets["val"], MemoryImages)
    assert isinstance(disk.sets["val"], FileImages)
    assert memory.describe() == disk.describe()
    for split in memory.sets:
        assert torch.equal(pixels_of(memory, split), pixels_of(disk, split))
        assert torch.equal(memory.sets[split].labels, disk.sets[split].labels)
    disk.num_workers = 2
    batches = zip(memory.train_dataloader(), disk.train_dataloader(), strict=True)
    for (images, labels), (same_images, same_labels) in batches:
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)


def test_crops_are_of_the_whole_picture(tmp_path):
    """Left and right of the square, too; and those that torchvision draws with the same seed."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(10):
            wide = np.zeros((20, 60, 3), dtype=np.uint8)
            wide[:, :20, 0] = wide[:, 20:40, 1] = wide[:, 40:, 2] = 200 + number
            Image.fromarray(wide).save(tmp_path / name / f"{number}.png")
    for memory_gb in (None, 0):
        options = {"image_size": 8, "seed": 3, "memory_gb": memory_gb, "num_workers": 0}
        data = ready(tmp_path, augment={"crop_min_area": 0.2}, **options)
        sampler = data.train_dataloader().sampler
        (images, _), places = next(iter(data.train_dataloader())), list(sampler)
        assert images.shape == (16, 3, 8, 8)
        assert (images.amax(dim=(0, 2, 3)) > 199).all()
        assert pixels_of(data, "train")[:, [0, 2]].max() < 40  # the square shows the middle
        crop = v2.RandomResizedCrop(8, (0.2, 1.0), interpolation=F.InterpolationMode.BICUBIC)
        for image, (epoch, place, number) in zip(images, places, strict=True):
            key = np.random.SeedSequence([3, epoch, place]).generate_state(1)[0]
            torch.manual_seed(int(key))
            expected = crop(data.sets["train"].picture(number))
            assert torch.equal(image, F.pil_to_tensor(expected))


def test_crops_are_the_same_with_any_number_of_processes(tmp_path):
    make_images(tmp_path, {"a": 20, "b": 20}, side=31)
    data = ready(tmp_path, image_size=8, seed=3)
    items = data.items("train")

    def places(rank, world, start=0):
        sampler = PlacedSampler(items, world, rank, seed=3)
        sampler.set_epoch(2)
        sampler.start = start
        return list(sampler)

    one, two = places(0, 1), [places(rank, 2) for rank in (0, 1)]
    assert [place for _, place, _ in one] == list(range(32))
    assert sorted(two[0] + two[1], key=lambda place: place[1]) == one
    assert places(1, 2, start=5) == two[1][5:]
    images, labels = items.__getitems__(one)
    again, _ = items.__getitems__(one[7:9])
    assert torch.equal(images[7:9], again)
    assert labels.tolist() == [items.labels[number] for _, _, number in one]


@pytest.mark.parametrize("sampling", [None, "balanced"])
def test_training_stopped_in_an_epoch_goes_on_exactly(tmp_path, sampling):
    """Crops in workers, flips and a policy, and the order of the images."""
    root = make_images(tmp_path / "photos", {"a": 12, "b": 30}, side=17)

    def fit(resume=None):
        torch.manual_seed(0)
        data = ImageFolderData(
            root, image_size=8, batch_size=8, num_workers=1, sampling=sampling,
            augment={"crop_min_area": 0.3, "horizontal_flip": 0.5, "policy": "trivial"},
        )  # fmt: skip
        net = {"_target_": "torch.nn.Sequential", "_args_": [
            {"_target_": "torch.nn.Flatten"},
            {"_target_": "torch.nn.Linear", "in_features": 192, "out_features": 2}]}  # fmt: skip
        constant = {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0}
        module = ImageClassification(
            net, scheduler=constant, num_classes=2, mean=[0.5] * 3, std=[0.3] * 3
        )
        saved = ModelCheckpoint(
            tmp_path, filename="middle", every_n_train_steps=7, enable_version_counter=False
        )
        trainer = Trainer(
            accelerator="cpu", max_steps=9, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[ExactResume(), saved], limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        return trainer.fit_loop.total_batch_idx, module.model[1].weight

    whole, again = fit(), fit(tmp_path / "middle.ckpt")  # of five steps an epoch
    assert whole[0] == again[0] == 8
    assert torch.equal(whole[1], again[1])


def test_a_check_of_files_is_remembered_until_one_changes(tmp_path, monkeypatch, capfd):
    make_images(tmp_path, {"a": 10, "b": 10})
    first = ready(tmp_path, memory_gb=0)
    monkeypatch.setattr(
        "attnkit.tasks.images.scan.decode_files",
        lambda *_, **__: pytest.fail("decoded again"),
    )
    again = ready(tmp_path, memory_gb=0)
    assert again.describe() == first.describe()
    monkeypatch.undo()
    (tmp_path / "a" / "000.png").write_bytes(b"broken")
    assert len(ready(tmp_path, memory_gb=0, skip_corrupt=True).sets["train"]) == 15
    assert "000.png" in capfd.readouterr().err


def test_nothing_is_written_under_root(tmp_path):
    make_images(tmp_path / "train", {"a": 10, "b": 10})
    (tmp_path / "train" / "a" / "zero.png").write_bytes(b"")

    def listing():
        return sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*"))

    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(stat.S_IREAD | (stat.S_IEXEC if path.is_dir() else 0))
    before = listing()
    try:
        for memory_gb in (None, 0):
            data = ready(tmp_path, skip_corrupt=True, memory_gb=memory_gb)
            list(data.train_dataloader())
        assert listing() == before
    finally:
        for path in (tmp_path, *tmp_path.rglob("*")):
            path.chmod(stat.S_IRWXU)


def test_few_broken_files_are_named_and_left_out(tmp_path, capfd):
    make_images(tmp_path, {"a": 100, "b": 100}, side=8)
    (tmp_path / "a" / "empty.png").write_bytes(b"")
    (tmp_path / "b" / "text.jpg").write_text("no image")
    data = ready(tmp_path)
    error = capfd.readouterr().err
    assert "empty.png (zero bytes)" in error
    assert "text.jpg (not an image)" in error
    assert "2 of 202" in error
    assert sum(map(len, data.sets.values())) == 200


def test_many_broken_files_stop_the_run(tmp_path, capfd):
    make_images(tmp_path, {"a": 100, "b": 100}, side=8)
    for number in range(3):
        (tmp_path / "a" / f"empty{number}.png").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        ready(tmp_path)
    message = str(caught.value)
    assert "3 of 203" in message
    assert "empty0.png (zero bytes)" in message
    assert "data.skip_corrupt=true" in message
    assert len(message.splitlines()) <= 3
    assert sum(map(len, ready(tmp_path, skip_corrupt=True).sets.values())) == 200
    assert "empty2.png" in capfd.readouterr().err
    for path in (tmp_path / "b").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no image can be decoded in train of b"):
        ready(tmp_path, skip_corrupt=True)


@pytest.mark.parametrize("split", ["val", "test"])
def test_one_broken_file_in_a_given_split_stops_the_run(tmp_path, split):
    make_images(tmp_path / "train", {"a": 20, "b": 20}, side=8)
    make_images(tmp_path / split, {"a": 60, "b": 60}, side=8, first=50)  # of which 1 % is one
    (tmp_path / split / "b" / "empty.png").write_bytes(b"")
    with pytest.raises(UserError, match=rf"{split}: 1 of 121 .*\n.*empty.png") as caught:
        ready(tmp_path)
    assert "data.skip_corrupt=true" in str(caught.value)
    assert len(ready(tmp_path, skip_corrupt=True).sets[split]) == 120


def test_hidden_and_other_files_are_left_out(tmp_path, capfd):
    make_images(tmp_path, {"a": 5, "b": 5})
    (tmp_path / ".cache").mkdir()
    (tmp_path / "a" / "._000.png").write_bytes(b"\0")
    (tmp_path / "a" / "notes.txt").write_text("text")
    make_images(tmp_path / "b", {"deeper": 3}, first=50)
    data = ready(tmp_path)
    assert sum(map(len, data.sets.values())) == 13
    assert "1 × .txt" in capfd.readouterr().err


AB = {"a": 5, "b": 5}


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({"": {}}, "one folder per class, at least two; found none"),
        ({"": {"": 5}}, "one folder per class, at least two; found none"),
        ({"": {"only": 5}}, "found only 'only'"),
        ({"": {**AB, "hollow": 0}}, "class folders without images in .*: hollow"),
        ({"": {"a": 0, "b": 0}}, "no images under"),
        ({"val": AB, "test": AB}, "holds test, val but no train/"),
        ({"": {"train": 5}}, "but no train/ with one folder per class"),
        ({"train": AB, "": {"test": 5}}, "test must hold one folder per class"),
        ({"train": AB, "val": {**AB, "c": 1}}, r"differ from train's\nnot in train: c"),
        (
            {"train": {**AB, "c": 5}, "test": {**AB, "C": 5}},
            r"differ from train's\nnot in train: C\nmissing: c",
        ),
        ({"train": AB, "val": AB, "valid": AB}, "val and valid"),
    ],
)
def test_wrong_trees_are_explained(tmp_path, folders, message):
    root = tmp_path / "root"
    root.mkdir()
    for folder, counts in folders.items():
        make_images(root / folder, counts)
    with pytest.raises(UserError, match=message) as caught:
        ready(root, skip_corrupt=True)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("given", [{}, {"c": 0}])
def test_a_class_may_lack_in_test(tmp_path, capfd, given):
    make_images(tmp_path / "train", {"a": 15, "b": 15, "c": 15})
    make_images(tmp_path / "test", {"a": 5, "b": 5, **given}, first=50)
    data = ready(tmp_path)
    assert len(data.sets["test"]) == 10
    assert len(data.class_names) == 3
    assert "test: no images of c" in capfd.readouterr().err


def test_a_missing_root_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"root: no such folder: .*nowhere"):
        ImageFolderData(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="root"):
        ImageFolderData(None)
    with pytest.raises(ValueError, match="memory_gb"):
        ImageFolderData(tmp_path, memory_gb=-1)


def test_a_file_that_changes_while_in_use_is_named(tmp_path):
    make_images(tmp_path, {"a": 10, "b": 10})
    data = ready(tmp_path, memory_gb=0)
    path = Path(data.sets["train"].paths[0])
    os.truncate(path, 0)
    with pytest.raises(RunError, match=f"{path.name} changed while in use: zero bytes"):
        pixels_of(data, "train")
