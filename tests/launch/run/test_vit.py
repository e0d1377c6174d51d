"""The shipped task from the command line: train, test on one and two processes, predict."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

SMALL = ("model.dim=24", "model.depth=1", "trainer=cpu", "callbacks.curves=null")
ALONE = ("trust=none", "layer=-1")  # a layer, drawn without scores


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


def test_lightning_says_nothing_of_callbacks_that_are_there_twice(trained):
    assert "override existing callbacks" not in (trained / "run.log").read_text()


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("cpu_ddp", marks=pytest.mark.slow)])
def test_tested_again_it_is_the_same(attnkit, trained, trainer):
    """359 test images are not a multiple of two processes × 64: none may be seen twice."""
    done = attnkit("run=test", f"ckpt={trained}", f"trainer={trainer}", "run_dir=again")
    assert done.code == 0, done.err
    found = figures(Path("again"))
    assert found["test/accuracy"] > 0.15
    assert found == pytest.approx(figures(trained), abs=1e-6)


def test_all_files_of_another_folder_are_tested(attnkit, trained, tmp_path):
    for number, image in enumerate(load_digits().images[:7]):
        (tmp_path / "new" / str(number)).mkdir(parents=True)
        pixels = Image.fromarray((image * 15.9).astype("uint8"))
        pixels.save(tmp_path / "new" / str(number) / "a.png")
    done = attnkit(
        "run=test", f"ckpt={trained}", "data=image_folder", f"data.root={tmp_path / 'new'}",
        "trainer=cpu", "run_dir=again",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "test: 7 images" in done.out + done.err


def test_predict(attnkit, refused, trained, tmp_path):
    digits = load_digits()
    images = tmp_path / "images" / "3"
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
    assert all(row["truth"] == "3" for row in rows)  # as the folder is called
    shares = [[float(row[f"p({number})"]) for number in range(10)] for row in rows]
    assert all(abs(sum(share) - 1) < 1e-4 for share in shares)
    best = [str(share.index(max(share))) for share in shares]
    assert best == [row["label"] for row in rows] == [row["top5"].split()[0] for row in rows]
    assert "p(3)" not in done.out  # where there is no room for all of them
    assert "broken.png" in done.out + done.err

    # The checkpoint alone is enough, and gives the same.
    alone = tmp_path / "alone.ckpt"
    shutil.copy(trained / "checkpoints" / "best.ckpt", alone)
    done = attnkit("run=predict", f"ckpt={alone}", f"images={images / '03.png'}", "run_dir=one")
    assert done.code == 0, done.err
    (row,) = rows_of(Path("one/predictions.csv"))
    assert row["label"] == rows[3]["label"]
    assert float(row["probability"]) == pytest.approx(float(rows[3]["probability"]), abs=1e-5)

    refused(
        f"nothing in {images / 'broken.png'} could be predicted",
        "run=predict",
        f"ckpt={trained}",
        f"images={images / 'broken.png'}",
        begun=True,
    )


def test_the_layers_of_a_run_are_drawn(attnkit, refused, trained, tmp_path):
    for number, pixels in enumerate(load_digits().images[:3]):
        (tmp_path / f"images/{number}").mkdir(parents=True)
        image = Image.fromarray((pixels * 255 / 16).astype("uint8"))
        image.save(tmp_path / f"images/{number}/it.png")
    given = ("run=explain", f"ckpt={trained}", f"images={tmp_path}/images", "explain.trust=none")
    done = attnkit(*given, "explain.layer=*", "run_dir=seen")
    assert done.code == 0, done.err
    assert Image.open("seen/layers.png").width > 500
    assert "layers.png" in done.out
    arrays = np.load("seen/maps.npz")
    layers = [name for name in arrays if name.startswith("layer_")]
    assert layers == ["layer_model.blocks.0.attention"]
    assert arrays[layers[0]].shape == (3, 4, 4)
    refused("explain.layer: 9 is none of the 1 layers", *given, "explain.layer=9", "run_dir=none")


def test_a_gate_is_drawn_too(attnkit):
    few = ("trainer=cpu", "trainer.max_epochs=1", "trainer.limit_batches=2")
    drawn = ("callbacks=interpret", *(f"callbacks.interpret.{one}" for one in ALONE))
    done = attnkit("task=spatial", "attention=cbam", *few, *drawn, "run_dir=run")
    assert done.code == 0, done.err
    assert {path.name for path in Path("run/interpret").iterdir()} == {"epoch_001.png", "test.png"}
    done = attnkit("run=explain", "ckpt=run", *(f"explain.{one}" for one in ALONE), "run_dir=x")
    assert done.code == 0, done.err
    (gate,) = [values for name, values in np.load("x/maps.npz").items() if "layer_" in name]
    assert len(gate) == 8
    assert 0 < gate.min() < gate.max() < 1


def test_nothing_to_draw_is_said_before_training(attnkit):
    drawn = ("callbacks=interpret", *(f"callbacks.interpret.{one}" for one in ALONE))
    words = ("attention=none", "trainer.num_sanity_val_steps=0", "run_dir=run")
    done = attnkit("task=spatial", *drawn, *words)
    assert (done.code, Path("run").exists()) == (2, False)
    assert "neither attention with weights nor gates: nothing to draw" in done.err


def test_another_score_and_other_positions(attnkit):
    done = attnkit(
        *SMALL, "model.score=cosine", "model.positions=factorized2d", "trainer.max_epochs=1",
        "trainer.limit_batches=2", "run_dir=run",
    )  # fmt: skip
    assert done.code == 0, done.err
    (kernels,) = [line for line in done.out.splitlines() if "attention kernels" in line]
    assert kernels.split("│")[2].strip() == "flash"
    checkpoint = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    (learned,) = [tensor for name, tensor in state.items() if "log_temperature" in name]
    assert (learned != torch.full_like(learned, 0.1).log()).all()
    assert sum("factorized_positions" in name for name in state) == 2


def test_images_of_another_size_than_the_model(refused, trained):
    refused(
        "data.image_size: got 16, but the module was made for 8",
        "run=test",
        f"ckpt={trained}",
        "data.image_size=16",
    )


def test_checkpoint_that_is_none(refused, trained, tmp_path):
    for name, content in (("text.ckpt", b"hello"), ("empty.ckpt", b"")):
        (tmp_path / name).write_bytes(content)
        refused(name, "run=predict", f"ckpt={tmp_path / name}", f"images={tmp_path}")
    refused("does not fit the model", "run=test", f"ckpt={trained}", "model.dim=48", "run_dir=wide")


def test_task_of_the_checkpoint_counts(refused, trained):
    refused("did you mean depth?", "run=test", f"ckpt={trained}", "model.depht=3")


@pytest.mark.slow
def test_ranks_of_a_sweep_train_once(attnkit):
    """Stock Lightning's rank 1 would run the whole sweep again, in a second folder."""
    done = attnkit(
        "-m", *SMALL[:2], "trainer=cpu_ddp", "trainer.max_epochs=1", "trainer.limit_batches=3",
        "callbacks.curves=null", "optimizer.lr=1e-2,1e-3,1e-4", "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [p.name for p in Path.cwd().iterdir()] == ["sweep"]
    trials = sorted(p for p in Path("sweep").iterdir() if p.is_dir())
    assert [p.name[0] for p in trials] == ["0", "1", "2"]
    for trial in trials:
        assert sum(bool(row["val/loss"]) for row in rows_of(trial / "metrics.csv")) == 1
        assert json.loads((trial / "results.json").read_text())["steps"] == 3
    assert len(rows_of(Path("sweep/table.csv"))) == 3


@pytest.mark.slow
def test_two_ranks_at_half_the_batch_are_one(attnkit):
    """The same images in every step, so the same loss curve and weights.

    With SGD: AdamW divides the rounding error of a gradient that is zero (of key biases) by itself.
    """
    for name, batch in (("cpu", 16), ("cpu_ddp", 8)):
        done = attnkit(
            *SMALL[:2], f"trainer={name}", "trainer.max_epochs=3", "trainer.limit_train_batches=10",
            "trainer.accumulate_grad_batches=2", f"data.batch_size={batch}",
            "data.augment=null", "optimizer=sgd", "callbacks.curves=null", f"run_dir={name}",
        )  # fmt: skip
        assert done.code == 0, done.err
    curves = [
        [row["train/loss"] for row in rows_of(Path(name, "metrics.csv")) if row["train/loss"]]
        for name in ("cpu", "cpu_ddp")
    ]
    one, two = (list(map(float, curve)) for curve in curves)
    assert len(one) == 3
    assert one[0] > one[-1]
    assert one == pytest.approx(two, rel=1e-5)
    first, second = (
        torch.load(Path(name) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("cpu", "cpu_ddp")
    )
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_predict_in_the_order_of_the_images(attnkit, trained, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(7):
        pixels = (load_digits().images[number] * 255 / 16).astype("uint8")
        Image.fromarray(pixels).save(images / f"{number:02}.png")
    for number in (0, 5):  # one for each rank to leave out
        (images / f"0{number}_broken.png").write_text("no image")
    for name in ("cpu", "cpu_ddp"):
        done = attnkit(
            "run=predict", f"ckpt={trained}", f"images={images}", f"trainer={name}",
            "predict.batch_size=2", f"run_dir={name}",
        )  # fmt: skip
        assert done.code == 0, done.err
    assert (done.out + done.err).count("_broken.png") == 2
    one, two = (rows_of(Path(name, "predictions.csv")) for name in ("cpu", "cpu_ddp"))
    assert len(one) == 7
    for ours, theirs in zip(one, two, strict=True):  # of other batches: the last digit differs
        for name, text in ours.items():
            if name == "top5":  # class and probability, best first
                pairs = [[part.split() for part in row.split("; ")] for row in (text, theirs[name])]
                assert [kind for kind, _ in pairs[0]] == [kind for kind, _ in pairs[1]]
            elif name == "probability" or name.startswith("p("):
                assert float(text) == pytest.approx(float(theirs[name]), abs=1e-5)
            else:
                assert text == theirs[name]


def test_fsdp_needs_a_gpu(attnkit):
    done = attnkit(*SMALL[:2], "trainer=fsdp", "trainer.accelerator=cpu")
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert done.err.startswith("attnkit: trainer: The strategy `fsdp` requires a GPU accelerator")
    assert list(Path.cwd().iterdir()) == []
