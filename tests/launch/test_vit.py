"""The shipped task from the command line: train, test on one and two processes, predict."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

SMALL = ("model.dim=24", "model.depth=1", "trainer=cpu", "callbacks.curves=null")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A ViT that has seen the digits three times."""
    from attnkit.launch.main import main

    folder = tmp_path_factory.mktemp("vit") / "run"
    assert main([*SMALL, "trainer.max_epochs=3", f"run_dir={folder}", "optimizer.lr=5e-3"]) == 0
    return folder


def figures(folder: Path) -> dict:
    results = json.loads((folder / "results.json").read_text())
    return {name: value for name, value in results.items() if name.startswith("test/")}


def rows_of(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_config_is_filled_in_from_the_data(trained):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    model, module = config["model"], config["module"]
    assert (model["image_size"], model["in_channels"], model["num_classes"]) == (8, 1, 10)
    assert model["patch_size"] == 2
    assert module["class_names"] == [str(n) for n in range(10)]
    assert len(module["mean"]) == 1
    assert (trained / "confusion_matrix.png").is_file()


def test_one_and_two_processes_agree(attnkit, trained):
    """359 test images are no multiple of two processes × 64: none may be seen twice."""
    for name in ("cpu", "cpu_ddp"):
        done = attnkit("run=test", f"ckpt={trained}", f"trainer={name}", f"run_dir={name}")
        assert done.code == 0, done.err
    one, two = figures(Path("cpu")), figures(Path("cpu_ddp"))
    assert one["test/accuracy"] > 0.15
    assert one == pytest.approx(two, abs=1e-6)
    assert one == pytest.approx(figures(trained), abs=1e-6)


def test_predict(attnkit, trained, tmp_path):
    digits = load_digits()
    images = tmp_path / "images" / "below"
    images.mkdir(parents=True)
    for number in range(11):
        pixels = (digits.images[number] * 255 / 16).astype("uint8")
        Image.fromarray(pixels).save(images / f"{number:02}.png")
    (images / "broken.png").write_text("no image")

    done = attnkit("run=predict", f"ckpt={trained}", f"images={tmp_path}/images", "run_dir=all")
    assert done.code == 0, done.err
    rows = rows_of(Path("all/predictions.csv"))
    assert [Path(row["path"]).name for row in rows] == [f"{n:02}.png" for n in range(11)]
    assert all(0.1 < float(row["probability"]) <= 1 for row in rows)
    assert "broken.png" in done.out + done.err

    # The checkpoint alone is enough, and gives the same.
    alone = tmp_path / "alone.ckpt"
    shutil.copy(trained / "checkpoints" / "best.ckpt", alone)
    done = attnkit("run=predict", f"ckpt={alone}", f"images={images / '03.png'}", "run_dir=one")
    assert done.code == 0, done.err
    (row,) = rows_of(Path("one/predictions.csv"))
    assert (row["label"], row["probability"]) == (rows[3]["label"], rows[3]["probability"])

    done = attnkit("run=predict", f"ckpt={trained}", f"images={images / 'broken.png'}")
    assert done.code == 2
    assert f"nothing in {images / 'broken.png'} could be predicted" in done.err


def test_images_of_another_size_than_the_model(attnkit, trained):
    done = attnkit("run=test", f"ckpt={trained}", "data.image_size=16")
    assert done.code == 2
    assert "data.image_size: got 16, but the module was made for 8" in done.err


def test_checkpoint_that_is_none(attnkit, trained, tmp_path):
    for name, content in (("text.ckpt", b"hello"), ("empty.ckpt", b"")):
        (tmp_path / name).write_bytes(content)
        done = attnkit("run=predict", f"ckpt={tmp_path / name}", f"images={tmp_path}")
        assert done.code == 2, done.err
        assert name in done.err
        assert len(done.err.strip().splitlines()) <= 3
    done = attnkit("run=test", f"ckpt={trained}", "model.dim=48", "run_dir=wide")
    assert done.code == 2
    assert "does not fit the model" in done.err


def test_task_of_the_checkpoint_counts(attnkit, trained):
    done = attnkit("run=test", f"ckpt={trained}", "model.depht=3")
    assert done.code == 2
    assert "did you mean depth?" in done.err


def test_ranks_of_a_sweep_train_once(attnkit):
    """Stock Lightning's rank 1 would run the whole sweep again, in a second folder."""
    done = attnkit(
        "-m", *SMALL[:2], "trainer=cpu_ddp", "trainer.max_epochs=1", "trainer.limit_batches=3",
        "callbacks.curves=null", "optimizer.lr=1e-2", "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [p.name for p in Path.cwd().iterdir()] == ["sweep"]
    assert [p.name for p in Path("sweep").iterdir() if p.is_dir()] == ["0"]
    rows = rows_of(Path("sweep/0/metrics.csv"))
    assert sum(bool(row["val/loss"]) for row in rows) == 1
