"""Hydra's own words: what each means here, and which contradict each other."""

import re
from pathlib import Path

import pytest
import yaml

from attnkit.launch.config import hydra_words
from attnkit.launch.config.compose import Composer

QUICK = (
    "trainer.limit_batches=1", "trainer.max_epochs=1", "callbacks.curves=null",
    "callbacks.steps.cost=false", "logger.tensorboard=null", "callbacks.progress=null",
)  # fmt: skip


def test_the_folder_of_a_run(mine):
    done = mine(*QUICK, "hydra.run.dir=out/${task}_${module.width}_${hydra.job.name}",
                "hydra.job.name=named")  # fmt: skip
    assert done.code == 0, done.err
    assert Path("out/mine_11_named/results.json").is_file()
    done = mine(*QUICK, "hydra.job.name=named")
    assert done.code == 0, done.err
    assert [path.name for path in Path("outputs").iterdir()] == ["named"]


def test_the_folders_of_a_sweep(mine, found):
    done = mine(
        *QUICK, "-m", "module.lr=0.1,0.2", "hydra.sweep.dir=out/${task}",
        "hydra.sweep.subdir=${hydra.job.num}_${module.lr}_${hydra.job.override_dirname}",
        f"hydra.job.config.override_dirname.exclude_keys=[task,{','.join(key(QUICK))}]",
    )  # fmt: skip
    assert done.code == 0, done.err
    folders = {path.name for path in Path("out/mine").iterdir() if path.is_dir()}
    assert folders == {"0_0.1_module.lr=0.1", "1_0.2_module.lr=0.2"}
    assert found.states("out/mine") == ["done", "done"]


def key(overrides):
    return [override.partition("=")[0] for override in overrides]


def test_a_study_needs_numbered_folders(mine, refused):
    pytest.importorskip("optuna")
    refused(
        "${hydra.job.num}",
        "-m",
        "hydra/sweeper=optuna",
        "module.lr=0.1,0.2",
        "hydra.sweep.subdir=a",
        by=mine,
    )


def test_no_file_may_name_folders(refused, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text(
        "# @package _global_\nhydra: {sweep: {subdir: x}}\n"
    )
    refused("hydra.sweep: set in a file", "--config-dir", tmp_path, "task=vit", "experiment=x")


def test_a_job_name_is_for_its_composer_alone():
    one, other = Composer(), Composer()
    assert hydra_words.read(one, ["task=vit", "hydra.job.name=x"], multirun=False) == (
        ["task=vit"], [],
    )  # fmt: skip
    assert (one.job_name, other.job_name) == ("x", None)
    assert re.fullmatch(r"\w+", one.job_name)


def test_without_a_bar(mine):
    """Each way to say it."""
    for word in ("trainer.enable_progress_bar=false", "callbacks.progress=null"):
        words = [quick for quick in QUICK if "progress" not in quick]
        done = mine(*words, word, f"run_dir={word[:5]}")
        assert done.code == 0, done.err
        assert "epoch 1/1" in done.out


def test_an_experiment_without_its_first_line(attnkit, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("trainer: {max_epochs: 3}\n")
    done = attnkit("--config-dir", tmp_path, "experiment=mine")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 2)
    assert "experiment/mine.yaml: its keys are below `experiment`" in done.err
    assert "'# @package _global_'" in done.err


@pytest.mark.parametrize("key", ["callbacks.kernels", "callbacks.curves"])
def test_a_key_is_left_out_null_or_not(attnkit, key):
    done = attnkit("--cfg", "job", f"~{key}")
    assert done.code == 0, done.err
    callbacks = yaml.safe_load(done.out)["callbacks"]
    assert {"kernels", "curves", "epochs"} - {*callbacks} == {key.partition(".")[2]}
