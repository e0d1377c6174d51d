"""Every labelled file is used or named, with its grey levels, alike in training, test, prediction
and explanation; of trees of folders, formats of pixels, and data modules of others."""

import re
import shutil

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from PIL import Image
from task_support import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import Compose, v2

from attnkit.lightning import Export, UserError
from attnkit.tasks.image_classification import (
    ImageClassification,
    ImageFolderData,
    PredictData,
    describe_batches,
)
from attnkit.tasks.images.decode import FLOATS, INTEGERS, range_of, read_image

SIDE = 8
CLASSES = ("ant", "bee")


pytestmark = pytest.mark.usefixtures("own_cache")


def noise(seed, dtype=np.uint8, top=255, shape=(SIDE, SIDE)):
    values = np.random.default_rng(seed).random(shape)
    return (values * top).astype(dtype)


def tree(root, counts, classes=CLASSES):
    """Images with `counts[folder]` in each class of a folder, no two alike; their paths."""
    paths = []
    for folder, count in counts.items():
        for name in classes:
            (root / folder / name).mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                paths.append(root / folder / name / f"{len(paths)}.png")
                seed = sum(map(ord, f"{root.name}{folder}")) * 1000 + len(paths)
                Image.fromarray(noise(seed)).save(paths[-1])
    return paths


def task_of(data, **options):
    """A linear module with random weights, of what the data module says."""
    facts = data.describe() if hasattr(data, "describe") else describe_batches(data)
    names = "num_classes class_names image_size in_channels mean std value_range"
    facts = {name: facts.get(name) for name in [*names.split(), "normalized_by"]}
    torch.manual_seed(0)
    pixels = facts["in_channels"] * SIDE * SIDE
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, facts["num_classes"]))
    return ImageClassification(**{"model": model, **facts, **options})


def trained(root, **options):
    """A folder's data, and a module that has seen a batch of it."""
    data = ImageFolderData(root, image_size=SIDE, augment=None, num_workers=0, **options)
    data.setup("fit")
    task = task_of(data)
    quiet(root, max_steps=1, limit_val_batches=0).fit(task, datamodule=data)
    return data, task


def pixels_of(data, split):
    return data.sets[split].fetch(torch.arange(len(data.sets[split])))


def predicted(task, images, folder):
    """The batch that `run=predict` and `run=explain images=…` have, and what is said of it."""
    data = PredictData(images, image_size=SIDE, in_channels=task.in_channels)
    data.trainer = quiet(folder)
    data.trainer.strategy.connect(task)
    data.setup("predict")
    return next(iter(data.predict_dataloader()))


def number_tested(task, data, folder, capfd):
    capfd.readouterr()
    quiet(folder).test(task, datamodule=data, verbose=False)
    said = capfd.readouterr()
    return int(re.search(r"^test: (\d+) images", said.out + said.err, re.M)[1])


# --- trees ----------------------------------------------------------------------------------------

# Folders with so many images of each class; which of them is val and which test; what is named.
TREES = {
    "capitals": ({"Training": 9, "Testing": 2}, None, "Testing", ""),
    "mixed": ({"Train": 9, "TEST": 2}, None, "TEST", ""),
    "dev": ({"train": 9, "dev": 2, "test": 3}, "dev", "test", ""),
    "eval": ({"train": 9, "eval": 3}, None, "eval", "eval/ as test"),
    "beside": ({"train": 9, "test": 2, "extra": 1}, None, "test", "not used, as no splits: extra"),
    "classes": ({".": 9}, None, None, ""),
}


@pytest.mark.parametrize("name", TREES)
def test_every_image_of_a_tree_is_used_or_named(tmp_path, capfd, name):
    counts, val, test, named = TREES[name]
    paths = tree(tmp_path / "old", counts)
    data, task = trained(tmp_path / "old", val_fraction=0.2, test_fraction=0.2)
    told = capfd.readouterr().err
    assert named in told
    seen = {image.numpy().tobytes() for split in data.sets for image in pixels_of(data, split)}
    left = [p for p in paths if noise_of(p) not in seen]
    assert all(f"{path.relative_to(tmp_path / 'old').parts[0]}" in told for path in left)
    for split, folder in (("val", val), ("test", test)):
        if folder is not None:
            given = {noise_of(p) for p in paths if p.parent.parent.name == folder}
            assert {image.numpy().tobytes() for image in pixels_of(data, split)} == given
    # The same files again: those that training left out.
    again = ImageFolderData(data.root, val_fraction=0.2, test_fraction=0.2)
    assert number_tested(task, again, tmp_path, capfd) == len(data.sets["test"])
    assert torch.equal(pixels_of(again, "test"), pixels_of(data, "test"))
    # Other files: all of them, or their test split.
    tree(tmp_path / "new", counts)
    new = ImageFolderData(tmp_path / "new")
    assert number_tested(task, new, tmp_path, capfd) == 2 * counts[test or "."]
    _, found = predicted(task, tmp_path / "old", tmp_path)
    assert sorted(found) == sorted(map(str, paths))


def noise_of(path):
    return np.array(Image.open(path)).tobytes()


def test_a_new_folder_may_hold_test_alone_and_lack_classes(tmp_path, capfd):
    tree(tmp_path / "old", {".": 9}, ("ant", "bee", "cat"))
    data, task = trained(tmp_path / "old")
    tree(tmp_path / "new", {"Test": 3}, ("cat", "ant"))
    new = ImageFolderData(tmp_path / "new")
    assert number_tested(task, new, tmp_path, capfd) == 6
    assert new.sets["test"].labels.tolist() == [0, 0, 0, 2, 2, 2]  # as in training
    tree(tmp_path / "one", {".": 2}, ("bee",))
    assert number_tested(task, ImageFolderData(tmp_path / "one"), tmp_path, capfd) == 2
    every = ImageFolderData(data.root, test_fraction=1)
    assert number_tested(task, every, tmp_path, capfd) == 27
    with pytest.raises(UserError, match="test_fraction: 1 leaves nothing to train on"):
        every.setup("fit")
    new = ImageFolderData(data.root)
    new.trainer = quiet(tmp_path)
    new.trainer.strategy.connect(task)
    new.setup("test")  # as `run=explain` does
    assert len(new.test_dataloader().dataset) == len(data.sets["test"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: tree(root, {".": 2}, ("ant", "fly")), "not in the module: fly"),
        (lambda root: tree(root, {"train": 2, "val": 2}), "no test split, only train, val"),
        (lambda root: tree(root, {".": 2}, (".",)), "there are none"),
    ],
)
def test_new_folders_that_cannot_be_tested(tmp_path, make, message):
    tree(tmp_path / "old", {".": 9})
    _, task = trained(tmp_path / "old")
    make(tmp_path / "new")
    with pytest.raises(UserError, match=message) as error:
        quiet(tmp_path).test(task, datamodule=ImageFolderData(tmp_path / "new"))
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"Train": 4, "train": 4}, "holds both Train and train"),
        ({"train": 4, "test": 4, "eval": 4}, "holds both eval and test"),
        ({"seg_train": 4, "seg_test": 4}, "seg_test and seg_train in .* may be splits or classes"),
    ],
)
def test_names_that_may_be_splits_are_asked_for(tmp_path, counts, message):
    tree(tmp_path / "old", counts)
    with pytest.raises(UserError, match=message) as error:
        trained(tmp_path / "old")
    assert len(str(error.value).splitlines()) <= 3


def test_files_that_are_not_read_are_named(tmp_path, capfd):
    root = tmp_path / "old"
    tree(root, {"train": 9})
    picture = Image.fromarray(noise(1, shape=(SIDE, SIDE, 3)))
    for name in ("a.pcx", "b.jp2", "c.tga"):
        picture.save(root / "train/ant" / name)
    shutil.copy(root / "train/ant/0.png", root / "train/ant/no_suffix")
    shutil.copy(root / "train/ant/0.png", root / "train/ant/.hidden.png")
    shutil.copy(root / "train/ant/0.png", root / "train/loose.png")
    (root / "train/ant/notes.txt").write_text("text")
    (root / "train/ant/README").write_text("text")
    told = r"4 files are not read: 1 × no suffix \(ant/README\), 1 × .txt \(ant/notes.txt\), "
    told += r"1 × hidden \(ant/.hidden.png\), 1 × outside a class \(loose.png\)"
    data, task = trained(root)
    assert sum(map(len, data.sets.values())) == 18 + 4
    assert re.search(told, capfd.readouterr().err)
    _, paths = predicted(task, root / "train/ant", tmp_path)
    assert len(paths) == 9 + 4
    assert "3 files are not read: 1 × no suffix (README), 1 × .txt" in capfd.readouterr().err


# --- pixels ---------------------------------------------------------------------------------------


def full(n):
    """Floats of which one is exactly what 16 bits end with."""
    values = noise(n, np.float32, 65535)
    values[0, 0] = 65535
    return values


# Values of grey files, their range, and how they are said; None: they are of 8 bits, and nothing.
GREYS = {
    "8 bits": (lambda n: noise(n), None),
    "8 bits in 16": (lambda n: noise(n, np.uint16, 255), [0, 255]),
    "12 bits in 16": (lambda n: noise(n, np.uint16, 4095), [0, 4095]),
    "16 bits": (lambda n: noise(n, np.uint16, 65535), [0, 65535]),
    "signed": (lambda n: noise(n, np.int32, 4000) - 1000, "found"),
    "floats to 1": (lambda n: noise(n, np.float32, 1), [0, 1]),
    "floats to 255": (lambda n: noise(n, np.float32, 255), [0, 255]),
    "floats to 65535": (full, [0, 65535]),
    "small floats": (lambda n: noise(n, np.float32, 0.1), "found"),
    "signed floats": (lambda n: noise(n, np.float32, 2) - 1, "found"),
}


@pytest.mark.parametrize(
    ("name", "memory_gb"),
    [*((name, None) for name in GREYS), *((name, 0) for name in list(GREYS)[1::3])],
)
def test_grey_levels_are_kept_everywhere(tmp_path, capfd, name, memory_gb):
    make, expected = GREYS[name]
    suffix = "png" if name == "8 bits" else "tif"
    shape, every = (SIDE, SIDE), []
    for split, count in (("train", 4), ("test", 2)):
        for label in CLASSES:
            (tmp_path / "old" / split / label).mkdir(parents=True)
            for number in range(count):
                values = make(len(every))
                every.append(values)
                file = tmp_path / "old" / split / label / f"{number}.{suffix}"
                Image.fromarray(values).save(file)
    assert every[0].shape == shape
    data, task = trained(tmp_path / "old", val_fraction=0.3, memory_gb=memory_gb)
    told = capfd.readouterr().err
    seen = np.stack(every[:8])
    if expected == "found":
        expected = pytest.approx([min(0, seen.min()), seen.max()])
    assert data.value_range == task.value_range == expected
    assert told.count("value_range=[") == (expected is not None)
    low, high = data.value_range or (0, 255)
    test = pixels_of(data, "test")[:, 0].numpy().astype(float)
    # Up to the rounding to one of 256 levels.
    wanted = (np.stack(every[8:]).clip(low, high) - low) / (high - low) * 255
    assert np.abs(test - wanted).max() <= 1
    assert len(np.unique(test)) > 150
    again = ImageFolderData(data.root, memory_gb=memory_gb, num_workers=0)
    number_tested(task, again, tmp_path, capfd)
    assert torch.equal(pixels_of(again, "test"), pixels_of(data, "test"))
    batch = predicted(task, data.root / "test", tmp_path)
    assert torch.equal(batch[0], pixels_of(data, "test"))
    assert torch.equal(task.explained(batch).pictures, batch[0] / 255)
    assert task.preprocessing()["value_range"] == data.value_range


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ([], None),
        ([("a band beside the colours", 0, 255)], None),
        ([(INTEGERS, 0, 3), (INTEGERS, 2, 1000)], [0, 1023]),
        ([(INTEGERS, 5, 70000)], [0, 70000]),
        ([(INTEGERS, 0, 0)], [0, 255]),
        ([(FLOATS, -1e-7, 1.000001)], [0, 1]),
        ([(FLOATS, 0, 2.5)], [0, 2.5]),
        ([(FLOATS, 7, 7)], [0, 7]),
        ([(FLOATS, 0, 255), (INTEGERS, 0, 200)], [0, 255]),
    ],
)
def test_one_range_for_all_files(depths, expected):
    assert range_of({str(n): depth for n, depth in enumerate(depths)}) == expected


def test_integers_beside_floats_of_another_range_are_refused():
    depths = {"a.tif": (INTEGERS, 0, 4000), "b.tif": (FLOATS, 0, 1)}
    with pytest.raises(UserError, match=r"a\.tif holds integers .*, 0 to 4095 and b\.tif holds"):
        range_of(depths)


def test_a_module_that_learned_from_8_bits_says_how_it_reads_more(tmp_path, capfd):
    tree(tmp_path / "old", {".": 9})
    _, task = trained(tmp_path / "old")
    (tmp_path / "new").mkdir()
    for number in range(3):
        Image.fromarray(noise(number, np.uint16, 4095)).save(tmp_path / f"new/{number}.tif")
    predicted(task, tmp_path / "new", tmp_path)
    told = capfd.readouterr().err
    assert told.count("value_range=[0,65535]") == 1
    task.value_range = [0, 1023]
    predicted(task, tmp_path / "new", tmp_path)
    assert re.search("outside, in 1, is cut off", capfd.readouterr().err)


BANDS = noise(5, shape=(SIDE, SIDE, 4))


def _sixteen(path):
    """A PNG of colours of 16 bits, which Pillow cannot write."""
    import struct
    import zlib

    values = noise(6, np.uint16, 4095, (SIDE, SIDE, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in parts.items()
        )
    )


@pytest.mark.parametrize(
    ("name", "save", "line"),
    [
        ("rgbn.tif", Image.fromarray(BANDS).save, "a band beside the colours; it is left out"),
        ("deep.png", _sixteen, "colours of 16 bits; the upper 8 of them are read"),
        ("rgba.png", Image.fromarray(BANDS).save, ""),
    ],
)
def test_what_is_left_out_of_colours_is_said(tmp_path, capfd, name, save, line):
    paths = tree(tmp_path / "old", {".": 9})
    save(tmp_path / "old" / "ant" / name)
    data, task = trained(tmp_path / "old")
    told = capfd.readouterr().err
    assert (line in told) if line else ("colours" not in told)
    predicted(task, tmp_path / "old", tmp_path)
    told = capfd.readouterr().err
    assert (line in told) if line else ("colours" not in told)
    if name == "rgbn.tif":
        read = read_image(tmp_path / "old" / "ant" / name, SIDE)
        assert np.array_equal(read.permute(1, 2, 0).numpy(), BANDS[..., :3])
    assert len(paths) + 1 == sum(map(len, data.sets.values()))


# --- equal files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_gb", [None, 0])
def test_equal_files_are_named_and_on_one_side(tmp_path, capfd, memory_gb):
    root = tmp_path / "old"
    paths = tree(root, {".": 20})
    for number in range(15):
        for path in (paths[number], paths[20 + number]):
            shutil.copy(path, path.with_name(f"copy of {path.name}"))
    shutil.copy(paths[0], root / "bee" / "wrong.png")
    data, _ = trained(root, memory_gb=memory_gb)
    told = capfd.readouterr().err
    assert "31 files are equal to others" in told
    assert re.search(r"under two labels: 1 file is .*wrong\.png = .*ant/0\.png", told)
    assert "in two splits" not in told
    assert sum(map(len, data.sets.values())) == 71
    seen = [{i.numpy().tobytes() for i in pixels_of(data, split)} for split in data.sets]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 40
    assert all(len(data.sets[split]) > 3 for split in data.sets)


def test_equal_files_of_given_splits_are_named(tmp_path, capfd):
    root = tmp_path / "old"
    paths = tree(root, {"train": 5, "test": 3})
    shutil.copy(paths[1], root / "test" / "ant" / "again.png")
    Image.new("L", (SIDE, SIDE)).save(root / "train" / "ant" / "black.png")
    Image.new("L", (SIDE, SIDE)).save(root / "test" / "ant" / "black.bmp")  # other bytes
    trained(root, val_fraction=0.3)
    told = capfd.readouterr().err
    assert re.search(r"in two splits: 1 file is .*test/ant/again\.png = .*train/ant/1\.png", told)


# --- data modules of others -----------------------------------------------------------------------

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]
NORMALIZE = v2.Normalize(MEAN, STD)
PIXELS = torch.from_numpy(noise(7, shape=(24, 3, SIDE, SIDE)))


class Theirs(LightningDataModule):
    """As most are written; `change` makes batches of pixels from 0 to 1."""

    def __init__(self, change, **facts):
        super().__init__()
        self.__dict__.update(facts)
        self.dataset = TensorDataset(change(PIXELS), torch.arange(24) % 3)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=24)

    test_dataloader = val_dataloader = train_dataloader


class Described(Theirs):
    def describe(self):
        names = {"num_classes": 3, "class_names": ["0", "1", "2"], "image_size": SIDE}
        return {**names, "in_channels": 3, "mean": [0.0] * 3, "std": [1.0] * 3, **self.facts}


def scaled(images):
    return images / 255


def normalized(images):
    return NORMALIZE(images / 255)


KNOWN = {
    "bytes": Theirs(lambda images: images),
    "floats": Theirs(scaled),
    "with a transform": Theirs(normalized, transform=Compose([NORMALIZE])),
    "with transforms": Theirs(normalized, transforms={}, steps=[v2.Compose([NORMALIZE])]),
    "described": Described(normalized, facts={"normalized_by": {"mean": MEAN, "std": STD}}),
    "described floats": Described(scaled, facts={"mean": MEAN, "std": STD}),
}
UNKNOWN = {
    "bare": Theirs(normalized),
    "to 255": Theirs(lambda images: images.float()),
    "another transform": Theirs(normalized, transform=v2.Normalize([0.5] * 3, [0.9] * 3)),
    "two transforms": Theirs(normalized, a=NORMALIZE, b=v2.Normalize([0.1] * 3, [0.1] * 3)),
    "described": Described(normalized, facts={}),
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "files").mkdir()
    for number, image in enumerate(PIXELS):
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / "files" / f"{number:02}.png")
    return tmp_path / "files"


@pytest.mark.parametrize("name", KNOWN)
def test_the_label_of_a_test_is_that_of_a_prediction(tmp_path, files, name, capfd):
    data = KNOWN[name]
    task = task_of(data)
    assert number_tested(task, data, tmp_path, capfd) == 24
    images, _ = next(iter(data.test_dataloader()))
    tested = task.classify(images)
    batch = predicted(task, files, tmp_path)
    found = task.predict_step(batch, 0)
    assert found["label"] == tested["label"]
    assert len(set(found["label"])) == 3
    np.testing.assert_allclose(found["probability"], tested["probability"], rtol=1e-4)
    explained = task.explained(batch)
    torch.testing.assert_close(explained.pictures, PIXELS / 255)
    torch.testing.assert_close(explained.model(explained.inputs), task(images))
    torch.testing.assert_close(task.explained((images,)).pictures, PIXELS / 255)


@pytest.mark.parametrize("name", UNKNOWN)
def test_pixels_that_are_normalised_in_an_unknown_way_are_asked_for(tmp_path, files, name):
    data = UNKNOWN[name]
    task = task_of(data)
    images, _ = next(iter(data.test_dataloader()))
    if name == "described":  # a linear model of which the first batch says it
        task.optimizer = lambda parameters: torch.optim.SGD(parameters, 0.0)
        fit = quiet(tmp_path, max_epochs=1, limit_val_batches=0)
        fit.fit(task, datamodule=data)
        fit.save_checkpoint(tmp_path / "end.ckpt")
        checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
        again = task_of(data)
        again.on_load_checkpoint(checkpoint)
        assert again.normalized_by == {}
    with pytest.raises(UserError, match="normalized_by") as error:
        predicted(task, files, tmp_path)
    assert len(str(error.value).splitlines()) <= 3
    with pytest.raises(UserError, match="normalized_by"):
        task(PIXELS)
    assert (
        0
        <= task.explained((images,)).pictures.min()
        <= task.explained((images,)).pictures.max()
        <= 1
    )
    if name != "to 255":
        task = task_of(data, normalized_by={"mean": MEAN, "std": STD})
        found = task.predict_step(predicted(task, files, tmp_path), 0)
        assert found["label"] == task.classify(images)["label"]


def test_an_export_of_pixels_normalised_in_an_unknown_way_is_refused(tmp_path):
    model = {"_target_": "attnkit.ViT", "image_size": SIDE, "patch_size": 4, "in_channels": 3}
    model |= {"num_classes": 3, "dim": 4, "depth": 1, "num_heads": 1}
    with pytest.raises(UserError, match=r"torch_export: module\.normalized_by: the data"):
        Export(tmp_path / "out", ["torch_export"])(task_of(UNKNOWN["bare"], model=model))
