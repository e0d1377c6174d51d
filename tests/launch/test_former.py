"""Runs, a sweep and an export of version 0.1 still work, though the code they name has moved.

The files in tests/former were written by the commands of its README.md at commit 9ea87cf, the last
with `_target_`s that are paths of files, such as attnkit.models.vit.ViT.
"""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attnkit as package
from attnkit.lightning.build.build import find
from attnkit.lightning.build.renamed import _FORMER

# What `run=test ckpt=…` gave at that commit.
TESTED = {"vit": 2.4948318004608154, "graph": 2.2987916469573975}
FORMER = Path(__file__).parent.parent / "former"
pytestmark = pytest.mark.slow


@pytest.fixture
def former(tmp_path):
    return Path(shutil.copytree(FORMER, tmp_path / "former"))


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def test_the_files_name_former_paths():
    texts = [path.read_text() for path in FORMER.rglob("*.yaml")]
    texts += [path.read_text() for path in FORMER.rglob("config.json")]
    named = set(re.findall(r"attnkit\.\w+\.\w+\.\w+", " ".join(texts)))
    assert {"attnkit.models.vit.ViT", "attnkit.models.gat.GAT"} <= named & set(_FORMER)
    assert "attnkit.launch.metrics_csv.MetricsCSV" in named


@pytest.mark.parametrize("target", [name for name in _FORMER if "pruning" not in name])
def test_former_names_lead_somewhere(target):
    assert callable(find(target))


@pytest.mark.parametrize("task", ["vit", "graph"])
def test_resume(attnkit, former, task):
    run = former / task / "run"
    before = results_of(run)
    done = attnkit(f"resume={run}", "trainer.max_epochs=2")
    assert done.code == 0, done.err
    after = results_of(run)
    assert (before["epochs"], after["epochs"]) == (1, 2)
    assert after["steps"] == 2 * before["steps"]
    with (run / "metrics.csv").open(newline="") as file:
        losses = [row["val/loss"] for row in csv.DictReader(file) if row["val/loss"]]
    assert len(losses) == 2
    assert float(losses[0]) == before["val/loss"]
    assert "home/user" not in (run / "config.yaml").read_text()


@pytest.mark.parametrize("ckpt", ["run", "run/checkpoints/best.ckpt"])
@pytest.mark.parametrize("task", ["vit", "graph"])
def test_test(attnkit, former, task, ckpt):
    done = attnkit("run=test", f"ckpt={former / task / ckpt}", "run_dir=tested")
    assert done.code == 0, done.err
    assert results_of(Path("tested"))["test/loss"] == pytest.approx(TESTED[task], rel=1e-5)


def test_predict_and_export(attnkit, former):
    run = former / "vit" / "run"
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save("digit.png")
    done = attnkit("run=predict", f"ckpt={run}", "images=digit.png", "run_dir=told")
    assert done.code == 0, done.err
    with Path("told/predictions.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)

    formats = "export.formats=[safetensors]"
    done = attnkit("run=export", f"ckpt={run}", formats, "run_dir=exported")
    assert done.code == 0, done.err
    images = torch.from_numpy(pixels)[None, None]
    for exported in (Path("exported/export"), former / "vit" / "exported" / "export"):
        module = package.load(exported)
        assert type(module.model) is package.ViT
        assert module.classify(images)["label"] == [row["label"]]
        found = module.classify(images)["probability"][0]
        assert found == pytest.approx(float(row["probability"]), abs=1e-5)
    text = Path("exported/export/config.json").read_text()
    assert not any(f'"{name}"' in text for name in _FORMER)


def test_predict_a_graph(attnkit, former):
    done = attnkit("run=predict", f"ckpt={former / 'graph' / 'run'}", "run_dir=told")
    assert done.code == 0, done.err
    assert len(Path("told/predictions.csv").read_text().splitlines()) == 1 + 1797


def test_resume_a_sweep(attnkit, found, former):
    sweep = former / "vit" / "sweep"
    assert found.states(sweep) == ["done", "waiting"]
    before = (sweep / "0_optimizer.lr=0.001" / "results.json").read_bytes()
    done = attnkit("-m", f"resume={sweep}")
    assert done.code == 0, done.err
    assert found.states(sweep) == ["done", "done"]
    assert len(found.rows(sweep)) == 2
    assert (sweep / "0_optimizer.lr=0.001" / "results.json").read_bytes() == before
