"""CIFAR-10 in torchvision's own format, small; nothing is downloaded and nothing written."""

import hashlib
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from attnkit.lightning import UserError
from attnkit.tasks.image_classification import CIFAR10Data


def write_cifar(folder, monkeypatch, per_file=40):
    """Files as Krizhevsky made them: a pickled dict of rows of 3,072 bytes, channel by channel."""
    base = folder / CIFAR10.base_folder
    base.mkdir(parents=True)
    random = np.random.default_rng(0)

    def write(name, content):
        (base / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((base / name).read_bytes()).hexdigest()]

    def images():
        return {
            "data": random.integers(0, 256, (per_file, 3072), dtype=np.uint8),
            "labels": [number % 10 for number in range(per_file)],
        }

    train = [write(name, images()) for name, _ in CIFAR10.train_list]
    test = [write(name, images()) for name, _ in CIFAR10.test_list]
    names = ["airplane", "automobile", *"bcdefghi", "truck"][:10]
    names[-1] = "truck"
    meta = write(CIFAR10.meta["filename"], {"label_names": names})
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", test)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta[1]})
    return base


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnkit"


def no_network(*_, **__):
    raise URLError("no route to host")


@pytest.mark.parametrize("given", ["parent", "folder itself"])
def test_root_is_read_and_not_written(tmp_path, cache, monkeypatch, given):
    base = write_cifar(tmp_path / "data", monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    data = CIFAR10Data(base if given == "folder itself" else base.parent)
    data.prepare_data()
    data.setup("fit")
    assert {split: len(images) for split, images in data.sets.items()} == {
        "train": 180,
        "val": 20,
        "test": 40,
    }
    facts = data.describe()
    assert (facts["image_size"], facts["patch_size"], facts["in_channels"]) == (32, 4, 3)
    assert facts["class_names"][0] == "airplane"
    rows = pickle.loads((base / "test_batch").read_bytes())
    expected = torch.from_numpy(rows["data"]).view(-1, 3, 32, 32)
    assert torch.equal(data.sets["test"].fetch(torch.arange(40)), expected)
    assert data.sets["test"].labels.tolist() == rows["labels"]
    assert sorted(tmp_path.rglob("*")) == before


def test_without_root_the_download_goes_to_the_cache(tmp_path, cache, monkeypatch):
    source = write_cifar(tmp_path / "source", monkeypatch)

    def download(self):
        source.rename(f"{self.root}/{CIFAR10.base_folder}")

    monkeypatch.setattr(CIFAR10, "download", download)
    data = CIFAR10Data()
    data.prepare_data()
    data.setup("fit")
    assert [path.name for path in cache.iterdir()] == [CIFAR10.base_folder]
    monkeypatch.setattr(CIFAR10, "download", no_network)
    CIFAR10Data().prepare_data()  # once is enough


def test_no_files_and_no_network(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.utils.urllib.request.urlopen", no_network)
    with pytest.raises(UserError, match="cannot be downloaded") as caught:
        CIFAR10Data().prepare_data()
    assert "no route to host" in str(caught.value)
    assert "data.root=FOLDER" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert list(cache.iterdir()) == []


def test_a_root_without_the_files_is_named(tmp_path, cache):
    data = CIFAR10Data(tmp_path)
    data.prepare_data()
    with pytest.raises(UserError, match=rf"{tmp_path} does not hold CIFAR-10"):
        data.setup("fit")
    with pytest.raises(ValueError, match="root: no such folder"):
        CIFAR10Data(tmp_path / "nowhere")
