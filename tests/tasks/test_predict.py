"""Prediction of files: prepared as in training, broken ones named."""

import numpy as np
import pytest
import torch
from PIL import Image
from task_support import quiet
from torch import nn

from attnkit.lightning import UserError
from attnkit.tasks.image_classification import ImageClassification, ImageFolderData, PredictData


@pytest.fixture
def tree(tmp_path):
    random = np.random.default_rng(0)
    for folder in ("a", "b/deep"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(3):
            pixels = random.integers(0, 256, (9, 13, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / folder / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def task():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 49, 7))
    return ImageClassification(model, num_classes=7, image_size=7, mean=[0.5] * 3, std=[0.5] * 3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_folder(tree, task, tmp_path, capfd, num_workers):
    (tree / "a" / "broken.png").write_bytes(b"")
    (tree / "notes.txt").write_text("no image")
    data = PredictData(tree, image_size=7, batch_size=4, num_workers=num_workers)
    batches = quiet(tmp_path).predict(task, datamodule=data)
    paths = [path for batch in batches for path in batch["path"]]
    names = ["a/0.png", "a/1.png", "a/2.png", "b/deep/0.png", "b/deep/1.png", "b/deep/2.png"]
    assert paths == [str(tree / name) for name in names]
    assert "broken.png (zero bytes)" in capfd.readouterr().err
    assert all(len(row) == 5 for batch in batches for row in batch["top5"])


def test_pixels_are_those_of_training(tree, task):
    training = ImageFolderData(tree, image_size=7, val_fraction=0.3, test_fraction=0.3)
    training.setup()
    data = PredictData(tree, image_size=7)
    data.setup("predict")
    (images, _), *_ = data.predict_dataloader()
    seen = {image.numpy().tobytes() for image in images}
    trained = torch.cat([part.fetch(torch.arange(len(part))) for part in training.sets.values()])
    assert seen == {image.numpy().tobytes() for image in trained}


def test_one_file_grey(tree, task):
    data = PredictData(tree / "a" / "1.png", image_size=5, in_channels=1)
    data.setup("predict")
    (images, paths), *_ = data.predict_dataloader()
    assert images.shape == (1, 1, 5, 5)
    assert paths == [str(tree / "a" / "1.png")]


def test_only_broken_files_give_no_rows(tmp_path, task, capfd):
    (tmp_path / "broken.png").write_bytes(b"")
    batches = quiet(tmp_path).predict(
        task, datamodule=PredictData(tmp_path / "broken.png", image_size=7)
    )
    assert [batch["label"] for batch in batches] == [[]]
    assert "broken.png" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": None}, "image_size: expected the side the model was trained on, got None"),
        ({"image_size": 1}, "image_size: expected"),
        ({"in_channels": 2}, "in_channels: expected 1 or 3, got 2"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"num_workers": -1}, "num_workers: expected at least 0, got -1"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        PredictData(tmp_path, **{"image_size": 7, **arguments})


@pytest.mark.parametrize("other", [{"image_size": 9}, {"image_size": 7, "in_channels": 1}])
def test_images_the_module_was_not_made_for_are_refused(tree, task, tmp_path, other):
    with pytest.raises(UserError, match=f"data.{list(other)[-1]}: got"):
        quiet(tmp_path).predict(task, datamodule=PredictData(tree, **other))


def test_missing_images_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"images: no such file or folder: .*nowhere"):
        PredictData(tmp_path / "nowhere", image_size=7)
    with pytest.raises(UserError, match="images: no image files under"):
        PredictData(tmp_path, image_size=7).setup()
