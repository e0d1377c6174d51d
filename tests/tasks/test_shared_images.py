"""Trials of a sweep decode their images once."""

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit.lightning.files import SHARED_FOLDER
from attnkit.tasks.image_classification import ImageFolderData
from attnkit.tasks.images import scan

SPLITS = {"val_fraction": 0.3, "test_fraction": 0.3}


@pytest.fixture
def photos(tmp_path):
    random = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(5):
            pixels = random.integers(0, 256, (13, 17, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "cats" / "broken.png").write_bytes(b"")
    return tmp_path / "photos"


@pytest.fixture
def decoded(monkeypatch):
    """The files that this process has decoded."""
    paths = []
    decode = scan.decode_files
    monkeypatch.setattr(
        scan, "decode_files", lambda files, *a, **o: paths.extend(files) or decode(files, *a, **o)
    )
    return paths


def images_of(photos, **options):
    data = ImageFolderData(photos, augment=None, skip_corrupt=True, **SPLITS, **options)
    data.setup()
    return {name: part.__getitems__(range(len(part))) for name, part in data.sets.items()}


def test_the_second_trial_decodes_nothing(photos, decoded, tmp_path, monkeypatch, capfd):
    expected = images_of(photos)
    assert len(decoded) == 11
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path / "shared"))
    images_of(photos)
    assert len(decoded) == 2 * 11
    capfd.readouterr()
    again = images_of(photos)
    assert len(decoded) == 2 * 11
    assert "broken.png (zero bytes)" in capfd.readouterr().err  # said in each trial's log
    for name, (images, labels) in expected.items():
        assert torch.equal(images, again[name][0])
        assert torch.equal(labels, again[name][1])
    images_of(photos, image_size=9)
    assert len(decoded) == 3 * 11
    (photos / "dogs" / "4.png").touch()
    images_of(photos)
    assert len(decoded) == 4 * 11


def test_whole_pictures_are_shared_too(photos, tmp_path, monkeypatch):
    """From which training takes its crops."""
    found = []
    for folder in ("", tmp_path / "shared", tmp_path / "shared"):
        monkeypatch.setenv(SHARED_FOLDER, str(folder))
        data = ImageFolderData(photos, image_size=8, skip_corrupt=True, **SPLITS)
        data.setup()
        train = data.sets["train"]
        found.append([np.asarray(train.picture(row)) for row in range(len(train))])
    assert found[0][0].shape == (13, 17, 3)
    for pictures in zip(*found, strict=True):
        assert all(np.array_equal(pictures[0], picture) for picture in pictures)


@pytest.mark.parametrize("channels", [1, 3])
def test_sums_found_while_decoding_are_those_of_the_pixels(photos, channels):
    data = ImageFolderData(photos, in_channels=channels, skip_corrupt=True, **SPLITS)
    data.setup()
    for part in data.sets.values():
        known = part.sums()
        part.known_sums = None
        assert known.shape == (2, channels)
        assert torch.equal(known, part.sums())


def test_a_folder_that_cannot_be_written_costs_time_only(photos, decoded, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path / "file"))
    assert [len(labels) for _, labels in images_of(photos).values()] == [2, 4, 4]
    assert len(decoded) == 11
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path / "shared"))
    images_of(photos)
    (damaged,) = (tmp_path / "shared").glob("*.pt")
    damaged.write_bytes(b"no zip file")
    images_of(photos)
    assert len(decoded) == 3 * 11


def test_a_file_that_could_not_be_read_for_a_while_is_read_later(photos, tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path / "shared"))
    read = scan.read_file

    def away(path, *others):
        if str(path).endswith("2.png"):
            raise scan.UndecodableImageError("not readable")
        return read(path, *others)

    with monkeypatch.context() as patch:
        patch.setattr(scan, "read_file", away)
        few = images_of(photos)
    counts = [
        sum(len(labels) for _, labels in found.values()) for found in (few, images_of(photos))
    ]
    assert counts == [8, 10]
