"""Where a run comes from, and a new one with the configuration of an old one."""

import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

QUICK = (
    "trainer=cpu", "trainer.max_epochs=1", "trainer.limit_batches=2", "model.dim=24",
    "model.depth=1", "callbacks.curves=null", "callbacks.cost=null",
    "callbacks.classes=null",
)  # fmt: skip


def origin(folder):
    return json.loads((Path(folder) / "origin.json").read_text())


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Run git in the current folder, which is a repository with one commit."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "n")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "n@n")

    def run(*words):
        return subprocess.run(
            ["git", *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    run("init", "-q")
    Path("notes.txt").write_text("one")
    run("add", "notes.txt")
    run("commit", "-qm", "first")
    return run


def test_a_run_says_where_it_comes_from_and_another_begins_with_it(attnkit, git):
    assert attnkit(*QUICK, "run_dir=old", "optimizer.lr=0.004").code == 0
    first = origin("old")
    (start,) = first["starts"]
    assert start["command"].startswith(f"attnkit {' '.join(QUICK)} run_dir=old")
    assert start["git"] == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    assert (start["host"], start["state"]) == (platform.node(), "done")
    assert start["packages"]["torch"] == torch.__version__
    assert start["started"] <= start["ended"]
    assert start["devices"]["kind"] == "cpu"
    assert {"model.image_size", "module.mean"} <= set(first["from_data"])
    hparams = yaml.safe_load(Path("old/tensorboard/hparams.yaml").read_text())
    assert hparams["optimizer"]["lr"] == 0.004

    Path("notes.txt").write_text("two")
    done = attnkit("--config", "old", "run_dir=new", "optimizer.lr=0.002", "data.image_size=6")
    assert done.code == 0, done.err
    old, new = (yaml.safe_load(Path(f, "config.yaml").read_text()) for f in ("old", "new"))
    assert (new["optimizer"]["lr"], new["model"]["dim"]) == (0.002, 24)
    assert new["callbacks"]["checkpoint"]["dirpath"] == str(Path("new/checkpoints").absolute())
    # what the data gave then, it gives again
    assert (old["model"]["image_size"], new["model"]["image_size"]) == (8, 6)
    (start,) = origin("new")["starts"]
    assert start["git"]["dirty"] is True
    assert "--config" in start["command"]


def test_each_start_has_an_entry(mine, attnkit, hers):
    assert mine("run_dir=run", "module.interrupt_at=1").code == 130
    (start,) = origin("run")["starts"]
    assert (start["state"], start["git"]) == ("stopped", None)
    assert f"--config-dir {hers}" in start["command"]
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("interrupt_at: 1", "interrupt_at: null"))
    assert attnkit("--config-dir", hers, "resume=run").code == 0
    assert [start["state"] for start in origin("run")["starts"]] == ["stopped", "done"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--config", "nowhere"), "nowhere; expected a run folder or its config.yaml"),
        (("--config", "old", "-m", "seed=1,2"), "--config: not with -m"),
        (("--config", "old", "resume=old"), "--config: begins a new run; not with resume="),
        (("--config", "old", "run=test", "ckpt=old"), "--config: begins a new run"),
        (("--config", "old", "model.depht=3"), "did you mean depth?"),
        (("--config", "old", "task=graph"), "task=graph: that run is of task vit"),
        (("--config", "notes"), "not the configuration of a run"),
    ],
)
def test_wrong_input(attnkit, argv, message):
    Path("notes").write_text("seed: 3")
    Path("old").mkdir()
    done = attnkit("--cfg", "job", "--resolve")
    Path("old/config.yaml").write_text(done.out)
    before = sorted(Path.cwd().rglob("*"))
    done = attnkit(*argv)
    assert (done.code, done.out) == (2, ""), done
    assert message in done.err
    assert len(done.err.splitlines()) <= 3
    assert sorted(Path.cwd().rglob("*")) == before
