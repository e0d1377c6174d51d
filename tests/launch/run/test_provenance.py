"""Where a run comes from, and a new one with the configuration of an old one."""

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from attnkit.launch.config.compose import Composer
from attnkit.launch.folder import git_state
from attnkit.lightning import UserError

QUICK = (
    "trainer=cpu", "trainer.max_epochs=1", "trainer.limit_batches=2", "model.dim=24",
    "model.depth=1", "callbacks.curves=null", "callbacks.steps.cost=false",
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


def test_no_program_of_a_repository_is_run(git, tmp_path):
    """Its configuration may be a stranger's, and `git status` would run these."""
    ran = tmp_path / "ran"
    trap = f"touch {ran}; false"
    Path("filtered.txt").write_text("one")
    Path(".gitattributes").write_text("filtered.txt filter=theirs\n")
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", "./.git", "below")
    git("add", "-A")
    git("commit", "-qm", "second")
    for part in (".", "below"):
        git("-C", part, "config", "core.fsmonitor", trap)
    for key in ("filter.theirs.clean", "filter.theirs.process", "remote.origin.uploadpack"):
        git("config", key, trap)
    git("config", "filter.theirs.required", "true")
    git("config", "remote.origin.url", str(Path.cwd()))  # it fetches what is missing
    git("config", "remote.origin.promisor", "true")
    hook = Path(".git/hooks/post-index-change")
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{trap}\n")
    hook.chmod(0o755)
    revision = git("-c", "core.fsmonitor=", "rev-parse", "HEAD")
    blob = git("-c", "core.fsmonitor=", "rev-parse", "HEAD:filtered.txt")
    Path(".git/objects", blob[:2], blob[2:]).unlink()
    ran.unlink(missing_ok=True)
    for text, dirty in (("one", False), ("two", True)):
        Path("filtered.txt").write_text(text)
        assert git_state(Path.cwd()) == {"revision": revision, "dirty": dirty}
        assert git_state(Path("below"))["dirty"] is False
        assert not ran.exists()
    git("config", "filter.of=theirs.clean", "cat")  # no option of git's can switch it off
    assert git_state(Path.cwd()) == {"revision": revision, "dirty": None}
    assert not ran.exists()
    for key in ("core.fsmonitor", "filter.theirs.process", "filter.theirs.clean"):
        ran.unlink(missing_ok=True)
        subprocess.run(["git", "status"], capture_output=True)
        assert ran.exists()  # this test would see it
        git("-c", "core.fsmonitor=", "config", "--unset", key)


@pytest.mark.parametrize("change", ["write", "stage", "remove", "link", "mode"])
def test_what_differs_from_the_revision(git, change):
    Path("link").symlink_to("notes.txt")
    git("add", "link")
    git("commit", "-qm", "second")
    Path("new.txt").write_text("git does not know it")
    os.utime("notes.txt", (1, 1))
    os.utime("link", (1, 1), follow_symlinks=False)
    assert git_state(Path.cwd())["dirty"] is False
    if change == "stage":
        git("add", "new.txt")
    elif change == "link":
        Path("link").unlink()
        Path("link").symlink_to("new.txt")
    elif change == "mode":
        Path("notes.txt").chmod(0o755)
    elif change == "remove":
        Path("notes.txt").unlink()
    else:
        Path("notes.txt").write_text("two")
    assert git_state(Path.cwd())["dirty"] is True


def test_each_start_has_an_entry(mine, attnkit, hers):
    assert mine("run_dir=run", "module.interrupt_at=1").code == 130
    (start,) = origin("run")["starts"]
    assert (start["state"], start["git"]) == ("stopped", None)
    assert f"--config-dir {hers}" in start["command"]
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("interrupt_at: 1", "interrupt_at: null"))
    assert attnkit("--config-dir", hers, "resume=run").code == 0
    assert [start["state"] for start in origin("run")["starts"]] == ["stopped", "done"]


def test_a_run_from_before_there_were_levels_is_of_the_default_one():
    composer = Composer()
    composed = composer.compose(["task=graph"])
    assert composed.level == "node"
    saved = {key: value for key, value in composed.items() if key != "level"}
    config = composer.overlay(saved, ["task=graph", "level=node", "seed=3"])
    assert config.seed == 3
    with pytest.raises(UserError, match="level=link: the saved run is of level node"):
        composer.overlay(saved, ["task=graph", "level=link"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--config", "nowhere"), "nowhere; expected a run folder or its config.yaml"),
        (("--config", "old", "-m", "seed=1,2"), "--config: not with -m"),
        (("--config", "old", "resume=old"), "--config: begins a new run; not with resume="),
        (("--config", "old", "run=test", "ckpt=old"), "--config: begins a new run"),
        (("--config", "old", "model.depht=3"), "did you mean depth?"),
        (("--config", "old", "task=graph"), "task=graph: the saved run is of task vit"),
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
