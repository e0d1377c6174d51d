"""Own folders of pictures and masks: every spelling of a mask, and every mistake by its file."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit.lightning.errors import UserError
from attnkit.tasks.segmentation import SceneMasksData, SegmentationFilesData
from attnkit.tasks.segmentation.files import find_pairs

HIGH, WIDE = 11, 13
COLOURS = np.array([[10, 20, 30], [200, 0, 0], [0, 0, 255]], dtype=np.uint8)


def classes(number=0):
    """Numbers of 3 classes, [HIGH, WIDE], another pattern for each number."""
    return np.random.default_rng(number).integers(0, 3, (HIGH, WIDE)).astype(np.uint8)


def picture(number=0):
    pixels = np.random.default_rng(100 + number).integers(0, 256, (HIGH, WIDE, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def save(root, mask=Image.fromarray, *, splits=("train", "val", "test"), count=2, suffix=".png"):
    for at, split in enumerate(splits):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture(10 * at + number).save(root / "images" / split / f"{number}.png")
            mask(classes(10 * at + number)).save(root / "masks" / split / f"{number}{suffix}")
    return root


def read(root, **options):
    options = {"image_size": [HIGH, WIDE], "num_workers": 0, **options}
    data = SegmentationFilesData(root, **options)
    data.setup()
    return data


def in_palette(numbers):
    made = Image.fromarray(numbers)
    made.putpalette(COLOURS.flatten().tolist())
    return made


SPELLINGS = {
    "numbers": (Image.fromarray, None),
    "grey in three channels": (lambda m: Image.fromarray(np.stack([m] * 3, axis=-1)), None),
    "sixteen bits": (lambda m: Image.fromarray(m.astype(np.uint16)), None),
    "palette": (in_palette, None),
    "colours": (
        lambda m: Image.fromarray(COLOURS[m]),
        "name,r,g,b\nsky,10,20,30\nroad, 200,0,0\nsea,0,0,255\n",
    ),
    "palette by colours": (in_palette, "name,color\nsky,#0a141e\nroad,#c80000\nsea,blue\n"),
    "values": (lambda m: Image.fromarray(40 * m + 7), "name,value\nsky,7\nroad,47\nsea,87\n"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_mask_is_read_in_every_spelling(spelling, tmp_path):
    write, table = SPELLINGS[spelling]
    save(tmp_path, write)
    if table:
        (tmp_path / "classes.csv").write_text(table)
    data = read(tmp_path)
    assert data.class_names == (["sky", "road", "sea"] if table else ["0", "1", "2"])
    for at, split in enumerate(("train", "val", "test")):
        for number in range(2):
            image, mask = data.sets[split].pair(number)
            assert np.array_equal(mask, classes(10 * at + number))
            assert np.array_equal(image.permute(1, 2, 0), np.asarray(picture(10 * at + number)))


def test_two_values_are_two_classes(tmp_path):
    save(tmp_path, lambda m: Image.fromarray((m > 0).astype(np.uint8) * 255))
    data = read(tmp_path)
    assert len(data.class_names) == 2
    assert np.array_equal(data.sets["train"].pair(1)[1], classes(1) > 0)
    for path in (tmp_path / "masks").rglob("*.png"):
        Image.open(path).convert("1").save(path)
    assert np.array_equal(read(tmp_path).sets["train"].pair(1)[1], classes(1) > 0)


def test_what_does_not_count(tmp_path):
    save(tmp_path, lambda m: Image.fromarray(np.where(m == 2, 255, m).astype(np.uint8)))
    mask = read(tmp_path).sets["train"].pair(0)[1].numpy()
    assert np.array_equal(mask, np.where(classes() == 2, 255, classes()))
    (tmp_path / "classes.txt").write_text("sky\nroad\nsea\n")
    for data in (read(tmp_path, ignored=[0]), read(tmp_path, ignored=["sky"])):
        assert data.class_names == ["road", "sea"]
        assert set(data.sets["train"].pair(0)[1].unique().tolist()) == {0, 255}


def test_a_mask_has_the_whole_name_of_its_picture_or_its_stem(tmp_path):
    save(tmp_path, splits=[""], count=12)
    picture(50).save(tmp_path / "images/0.bmp")
    Image.fromarray(classes(50)).save(tmp_path / "masks/0.bmp.png")
    pairs = {
        os.path.basename(p.image): os.path.basename(p.mask) for p in find_pairs(tmp_path)["train"]
    }
    assert (pairs["0.bmp"], pairs["0.png"], pairs["1.png"]) == ("0.bmp.png", "0.png", "1.png")


@pytest.mark.parametrize("item", ["see", 1.5, -1])
def test_what_is_ignored_is_a_class_or_a_number(item, tmp_path):
    (save(tmp_path) / "classes.txt").write_text("sky\nroad\nsea\n")
    read(tmp_path, ignored=[77])
    with pytest.raises(UserError, match=rf"a class or a number, got '{item}'; .* sky, road, sea"):
        read(tmp_path, ignored=[item])
    save(tmp_path, lambda m: Image.fromarray(COLOURS[m]))
    (tmp_path / "classes.csv").write_text(SPELLINGS["colours"][1])
    with pytest.raises(UserError, match="expected a class, got '1'"):
        read(tmp_path, ignored=[1])


def test_rows_of_one_name_are_one_class(tmp_path):
    save(tmp_path, lambda m: Image.fromarray(COLOURS[m]))
    (tmp_path / "classes.csv").write_text(SPELLINGS["colours"][1].replace("sea", "sky"))
    data = read(tmp_path)
    assert data.class_names == ["sky", "road"]
    assert np.array_equal(data.sets["train"].pair(0)[1], classes() == 1)


def test_numbers_that_are_ignored_are_no_classes(tmp_path):
    save(tmp_path, lambda m: Image.fromarray(np.where(m == 2, 254, m).astype(np.uint8)))
    assert read(tmp_path, ignored=[254]).class_names == ["0", "1"]


def test_a_split_in_which_nothing_counts_is_named(tmp_path, capfd):
    save(tmp_path)
    for path in (tmp_path / "masks/val").iterdir():
        Image.fromarray(np.full((HIGH, WIDE), 255, np.uint8)).save(path)
    read(tmp_path)
    said = capfd.readouterr().err
    assert "val: no pixel counts, as all are 255" in said
    assert "test: no pixel" not in said


def test_equal_pictures_stay_on_one_side(tmp_path):
    save(tmp_path, splits=[""], count=20)
    for number in range(10):
        shutil.copy(tmp_path / f"images/{number}.png", tmp_path / f"images/{number + 10}.png")
    data = read(tmp_path, val_fraction=0.2, test_fraction=0.2)
    keys = [set(data.sets[split].keys().tolist()) for split in ("train", "val", "test")]
    assert [len(found) for found in keys] == [6, 2, 2]
    assert len(set.union(*keys)) == 10


def test_without_splits_they_are_taken_from_train(tmp_path):
    save(tmp_path, splits=[""], count=20)
    data = read(tmp_path)
    assert {split: len(pairs) for split, pairs in data.sets.items()} == {
        "train": 16, "val": 2, "test": 2,
    }  # fmt: skip
    assert len(set(torch.cat([pairs.keys() for pairs in data.sets.values()]).tolist())) == 20


def saved(path, image):
    """A change of a folder: another image in place of a file."""
    return lambda root: image.save(root / path)


def written(path, content):
    return lambda root: (root / path).write_bytes(content.encode("latin-1"))


def spread_numbers(root):
    for path in (root / "masks").rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)) * 100).save(path)


def as_jpeg(root):
    (root / MASK).unlink()
    Image.fromarray(classes()).save(root / "masks/val/1.jpg")


MASK, TABLE = "masks/val/1.png", "classes.csv"
STRANGE = np.where(np.arange(WIDE) == 6, 9, classes()).astype(np.uint8)
COLOURED = Image.fromarray(COLOURS[classes()])
# A change of a folder, and the two parts of what is said of it.
MISTAKES = [
    (lambda root: (root / MASK).unlink(), r"1 of 2 images have no mask", r"images.val.1\.png"),
    (saved(MASK, Image.new("L", (5, 7))), r"masks.val.1\.png has 5 x 7", r"val.1\.png 13 x 11"),
    (saved(MASK, Image.fromarray(STRANGE)), r"masks.val.1\.png holds 9, which is none of the 3 cl",
     "ignored=.9."),
    (saved("masks/train/1.png", COLOURED), "holds colours or numbers above 255", "data.classes"),
    (written(MASK, "no image"), r"masks.val.1\.png cannot be read", ""),
    (written("images/val/1.png", "no image"), r"images.val.1\.png cannot be decoded", ""),
    (lambda root: (root / "masks").rename(root / "truth"), "must hold images/<split> and masks/<sp",
     "masks"),
    (as_jpeg, r"masks.val.1\.jpg cannot be read: a JPEG", "PNG"),
    (spread_numbers, "masks hold 0, 100, 200: a table", "data.classes=FILE.csv"),
    (written(TABLE, "name,r,g,b\nsky,1,2,3\nsea,0,0,1\nsky,1,1,1\nroad,0,0,1\n"),
     r"classes\.csv, line 5: 'road' has .* as 'sea'", ""),
    (written(TABLE, "name,value\nsky,7\nsea,7\n"), r"csv, line 3: 'sea' has .* as 'sky'", ""),
    (written(TABLE, "name,r,g,b\nsky,1,2,3\nsea,0,300,1\n"),
     r"classes\.csv, line 3: .* channels from 0 to 255", "300"),
    (written(TABLE, "name,value\nciel,0\nmer d'été,1\n"), r"classes\.csv is not UTF-8", ""),
    (written(TABLE, "name,r,g,b\nsky,1,2,x\n"), r"classes\.csv, line 2", "sky,1,2,x"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said", "more"), MISTAKES)
def test_a_mistake_is_named_with_its_file(change, said, more, tmp_path):
    change(save(tmp_path))
    with pytest.raises(UserError, match=said) as caught:
        read(tmp_path)
    caught.match(more)
    assert caught.value.message.count("\n") <= 2


def test_picture_and_mask_are_changed_together(tmp_path):
    def as_picture(mask):
        return Image.fromarray(mask)

    save(tmp_path, as_picture, splits=["train"], count=8)
    for number in range(8):  # the picture shows its mask
        Image.fromarray(np.stack([classes(number) * 100] * 3, -1)).save(
            tmp_path / "images" / "train" / f"{number}.png"
        )
    options = {"crop_min_area": 0.3, "horizontal_flip": 0.5, "interpolation": "nearest"}
    data = read(tmp_path, batch_size=8, val_fraction=0.2, test_fraction=0.2, **options)
    first, again = (next(iter(data.train_dataloader())) for _ in range(2))
    assert torch.equal(first[0], again[0])  # of the seed, the epoch and the place alone
    images, masks = first
    assert images.shape[-2:] == masks.shape[-2:] == (HIGH, WIDE)
    assert torch.equal(images[:, 0], masks * 100)
    plain = torch.stack([data.sets["train"].pair(n)[1] for n in range(len(data.sets["train"]))])
    assert not any(torch.equal(mask, one) for mask in masks for one in plain)


def test_windows_are_cut_out_and_pictures_keep_their_size(tmp_path):
    save(tmp_path)
    Image.fromarray(np.zeros((17, 9), np.uint8)).save(tmp_path / "masks/val/1.png")
    picture().resize((9, 17)).save(tmp_path / "images/val/1.png")
    data = read(tmp_path, windows=True, image_size=[5, 16], batch_size=2)
    images, masks = next(iter(data.train_dataloader()))
    assert images.shape[-2:] == masks.shape[-2:] == (5, 16)
    assert (masks == 255).any(dim=1).sum(dim=1).tolist() == [3, 3]  # beside the picture
    images, masks = next(iter(data.val_dataloader()))
    assert [tuple(mask.shape) for mask in masks] == [(HIGH, WIDE), (17, 9)]
    with pytest.raises(ValueError, match="crop_min_area: windows are cut out"):
        read(tmp_path, windows=True, crop_min_area=0.5)


def test_scenes_depend_on_the_seed_and_show_their_classes():
    made = [SceneMasksData(num_train=9, num_val=3, num_test=3, seed=s) for s in (0, 0, 1)]
    for data in made:
        data.setup()
    images = [data.sets["train"].images for data in made]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    facts = made[0].describe()
    assert facts["num_classes"] == len(facts["class_names"]) == 9
    assert made[0].class_counts.sum() == 9 * 48 * 48
    light = images[0].float().amin(dim=1)  # the background is a light grey
    shown = made[0].sets["train"].masks > 0
    assert light[~shown].mean() > 200 > light[shown].mean()
