"""What a run chooses for its data is said, kept, and the same again."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits


@pytest.fixture
def folder(tmp_path):
    digits = load_digits()
    for number in range(200):
        place = tmp_path / "photos" / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray((digits.images[number] * 255 / 16).astype(np.uint8))
        pixels.resize((28, 28)).save(place / f"{number:03d}.png")
    return tmp_path / "photos"


def test_a_run_says_what_was_chosen_and_keeps_it(attnkit, folder):
    job = ("task=vit", "data=image_folder", f"data.root={folder}", "trainer=cpu", "model.depth=1",
           "trainer.max_epochs=1", "callbacks.curves=null", "logger.tensorboard=null")  # fmt: skip
    done = attnkit(*job, "run_dir=run")
    assert done.code == 0, done.err
    words = "model.patch_size=4 data.augment.horizontal_flip=0.0 data.augment.crop_min_area=null"
    assert f"chosen for this data: {words}; give another value to change it" in done.out
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["patch_size"] == 4
    assert config["data"]["augment"]["horizontal_flip"] == 0.0
    assert config["data"]["augment"]["crop_min_area"] is None
    done = attnkit("resume=run", "trainer.max_epochs=2")
    assert (done.code, "chosen for" in done.out) == (0, False), done.err
    # without a choice to make: the same weights
    given = ("data.augment.horizontal_flip=0", "data.augment.crop_min_area=null")
    assert attnkit(*job, *given, "model.patch_size=4", "run_dir=given").code == 0
    losses = [json.loads(Path(f, "results.json").read_text()) for f in ("given", "run")]
    assert losses[1]["epochs"] == 2
    assert attnkit(*job, "run_dir=again").code == 0
    again = json.loads(Path("again/results.json").read_text())
    assert again["train/loss"] == losses[0]["train/loss"]
