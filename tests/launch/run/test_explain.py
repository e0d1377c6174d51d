"""`run=explain` from the command line: what it leaves, what it says, what it refuses."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr

import attnkit as toolkit
from attnkit.launch.main import main
from attnkit.tasks.image_classification import DigitsData, ImageClassification

SMALL = (
    "task=vit", "trainer=cpu", "model.dim=24", "model.depth=2", "model.num_heads=2",
    "trainer.max_epochs=4", "callbacks.curves=null", "callbacks.classes=null",
    "logger.tensorboard=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `one` and `two`, of other patches `coarse`, and pictures."""
    folder = tmp_path_factory.mktemp("explain")
    for name, changes in (
        ("one", ()),
        ("two", ("seed=1", "trainer.max_epochs=1")),
        ("coarse", ("model.patch_size=4", "trainer.max_epochs=1")),
    ):
        assert main([*SMALL, *changes, f"run_dir={folder / name}"]) == 0
    (folder / "pictures").mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (19, 23), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    (folder / "broken.png").write_text("no picture")
    return folder


def rows_of(folder) -> dict[str, dict[str, str]]:
    with Path(folder, "scores.csv").open(newline="") as file:
        return {row["map"]: row for row in csv.DictReader(file)}


def test_digits(attnkit, runs):
    """Maps and scores are those of `attnkit.explain` and `.trust` of the chosen test images."""
    methods = "explain.methods=[rollout,relevance]"
    done = attnkit("run=explain", f"ckpt={runs / 'one'}", methods, "run_dir=seen")
    assert done.code == 0, done.err
    left = {path.name for path in Path("seen").iterdir()}
    assert left >= {
        "explain.html",
        "scores.csv",
        "maps.npz",
        "config.yaml",
        "run.log",
        "results.json",
    }
    assert "shown: 8 of 359 test images, taken from each class in turn" in done.out
    assert "forwards of an image" in done.out
    assert done.out.count("┏") == 1, "one table"
    assert "\\n" not in done.out, "headings have lines"
    assert max(map(len, done.out[done.out.index("┏") :].split("└")[0].splitlines())) <= 80

    data = DigitsData(num_workers=0)
    data.setup()
    test = data.sets["test"]
    first = [int((test.labels == label).nonzero()[0]) for label in range(8)]
    images = test.fetch(torch.tensor(first)) / 255
    module = ImageClassification.load_from_checkpoint(runs / "one/checkpoints/best.ckpt")
    arrays, rows = np.load("seen/maps.npz"), rows_of("seen")
    assert [*rows] == ["rollout", "relevance", "random", "centre", "input_gradient"]
    for method in ("rollout", "relevance"):
        seen = toolkit.explain(module, images, method=method)
        assert arrays[f"map_{method}"] == pytest.approx(seen.map.numpy(), rel=1e-4)
        trust, row = seen.trust(), rows[method]
        gap = trust["gap in p, mean colour"]
        assert float(row["gap_mean"]) == pytest.approx(gap.map, rel=1e-3)
        assert float(row["gap_mean_random"]) == pytest.approx(gap.within, rel=1e-3)
        assert arrays[f"gap_mean_{method}"].mean() == pytest.approx(gap.map, rel=1e-3)
        assert float(row["class_sensitivity"]) == pytest.approx(
            trust["class sensitivity"].map, abs=1e-4
        )
        assert row["verdict_mean"] == "; ".join(trust.verdicts["mean"])
    assert arrays["predicted"].tolist() == seen.predicted.tolist()
    assert (
        float(rows["rollout"]["class_sensitivity"])
        == float(rows["centre"]["class_sensitivity"])
        == 0
    )
    assert rows["random"]["class_sensitivity"] == rows["random"]["similarity_random_weights"] == ""
    assert float(rows["centre"]["gap_mean"]) == pytest.approx(gap.centre, rel=1e-3)
    assert json.loads(Path("seen/results.json").read_text())["explained"] == 8


def test_pictures_a_class_and_another_checkpoint(attnkit, runs):
    """Of a folder the first; the class by its name; beside the maps those of another run."""
    done = attnkit(
        "run=explain", f"ckpt={runs / 'one'}", f"images={runs / 'pictures'}", "run_dir=seen",
        "explain.num_images=3", "explain.target=7", "explain.trust=none",
        f"explain.against={runs / 'two'}",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "shown: 3 of 5 images in" in done.out
    arrays, rows = np.load("seen/maps.npz"), rows_of("seen")
    assert arrays["target"].tolist() == [7, 7, 7]
    ours, theirs = arrays["map_relevance"], arrays["against_relevance"]
    assert ours.shape == theirs.shape == (3, 4, 4)
    wanted = np.mean(
        [spearmanr(a.ravel(), b.ravel()).statistic for a, b in zip(ours, theirs, strict=True)]
    )
    assert float(rows["relevance"]["spearman_against"]) == pytest.approx(wanted, abs=1e-4)
    assert wanted < 0.999, "the other run's maps are others"
    assert [*rows] == ["relevance"]
    assert "gap_mean" not in rows["relevance"]


REFUSED = [
    (("explain.method=shap",), "explain.method: expected one of attention, value_weighted"),
    (("explain.methods=[]",), "methods: expected some"),
    (("explain.target=10",), "explain.target: expected a class from 0 to 9, got 10"),
    (("explain.target=3", "explain.method=rollout"), "explain.target: 'rollout' gives the same"),
    (("explain.trust=sometimes",), "explain.trust: expected Literal['fast', 'full', 'none']"),
    (("explain.num_images=0",), "num_images: expected at least 1"),
    (
        ("explain.nodes=[1]",),
        "explain.nodes: expected none for images, got [1]; images are explained image by image",
    ),
    (
        ("explain.layer=9",),
        "explain.layer: 9 is none of the 2 layers model.blocks.0.attention, model.blocks.1.attent",
    ),
    (("explain.against=nowhere",), "explain.against: no file"),
    (("explain.against=RUNS/coarse",), "explain.against: its maps are 2 x 2, the first model's 4"),
    (("images=RUNS/one/checkpoints",), "images: no image files under"),
    (("images=RUNS/broken.png",), "images: none of the first 1 in"),
    (
        ("predict.batch_size=3",),
        "predict.batch_size=3: has no effect in run=",
    ),
    (("images=RUNS/pictures", "data.batch_size=3"), "data.batch_size=3: has no effect in run="),
    (("explain.device=cuda:99",), "explain.device: 'cuda:99' is not available"),
    (("trainer=cpu",), "trainer=cpu: has no effect in run=explain"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda given: str(given)[:40])
def test_refused(refused, runs, changes, said):
    changes = [change.replace("RUNS", str(runs)) for change in changes]
    refused(said, "run=explain", f"ckpt={runs / 'one'}", *changes)


def test_a_picture_that_cannot_be_read_is_left_out(attnkit, runs, tmp_path):
    for name in ("pictures/1.png", "pictures/2.png", "broken.png"):
        shutil.copy(runs / name, tmp_path)
    images = f"images={tmp_path}"
    done = attnkit("run=explain", f"ckpt={runs / 'one'}", images, "explain.trust=none", "run_dir=x")
    assert done.code == 0, done.err
    assert f"left out: {tmp_path / 'broken.png'} (not an image)" in done.out + done.err
    assert "shown: 2 of 3 images in" in done.out
    assert len(np.load("x/maps.npz")["map_relevance"]) == 2


def test_a_folder_that_cannot_be_written(refused, runs, tmp_path):
    (tmp_path / "file").write_text("")
    refused("run_dir", "run=explain", f"ckpt={runs / 'one'}", f"run_dir={tmp_path / 'file' / 'x'}")


def test_a_network_without_attention(attnkit, refused, runs):
    """What needs attention is refused, what does not is explained."""
    cnn = ("model=timm", "model.name=resnet10t", "model.image_size=64")
    given = (*cnn, f"images={runs / 'pictures'}", "explain.num_images=1", "explain.trust=none")
    refused("attention", "run=explain", *given, "explain.method=relevance", "run_dir=x")
    done = attnkit("run=explain", *given, "run_dir=x")
    assert done.code == 0, done.err
    assert "methods: grad_cam" in done.out
    assert np.load("x/maps.npz")["map_grad_cam"].shape == (1, 2, 2)
