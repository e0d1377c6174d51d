"""Hydra's own words: what each means here, and which contradict each other."""

import re
from pathlib import Path

import pytest
import yaml

from attnkit.launch.config import hydra_words
from attnkit.launch.config.compose import Composer
from attnkit.launch.sweep.record import read_sweep

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_folders_of_a_study(mine, attnkit, hers):
    pytest.importorskip("optuna")
    done = mine(
        *QUICK, "-m", "module.lr=0.1,0.2", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1",
        "hydra.sweep.dir=out", "hydra.sweep.subdir=no_${hydra.job.num}",
    )  # fmt: skip
    assert done.code == 0, done.err
    more = ("hydra.sweeper.n_trials=2",)
    assert attnkit("-m", "resume=out", "--config-dir", hers, *more).code == 0
    assert [trial.folder.name for trial in read_sweep(Path("out")).trials] == ["no_0", "no_1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("run_dir=a hydra.run.dir=b", "hydra.run.dir=b and run_dir=a: both name the folder"),
        ("-m seed=1,2 run_dir=a hydra.sweep.dir=b", "hydra.sweep.dir=b and run_dir=a: both name"),
        ("hydra.sweep.dir=a", "hydra.sweep.dir=a: only with -m"),
        ("hydra.sweep.subdir=a", "hydra.sweep.subdir=a: only with -m"),
        ("-m seed=1,2 hydra.run.dir=a", "hydra.run.dir=a: is for a single run"),
        ("-m seed=1,2 hydra.sweep.subdir=a", "trials 0 and 1 would share the folder a"),
        ("-m seed=1,2 hydra.sweep.subdir=a/${seed}", "expected the name of one folder"),
        ("-m seed=1,2 hydra.sweep.subdir=..", "expected the name of one folder"),
        ("-m seed=1,2 hydra.sweep.subdir=${sed}", "hydra.sweep.subdir: "),
        ("-m seed=1,2 hydra.sweep.dir=a,b", "hydra.sweep.dir=a,b: expected one value"),
        ("-m resume=x hydra.sweep.dir=a", "not together with resume=x, which has a folder"),
        ("resume=x hydra.run.dir=a", "not together with resume=x, which has a folder"),
        ("hydra.job.name=a hydra.run.dir=b", "hydra.job.name=a: has no effect"),
        ("hydra.job.name=a/b", "expected a name for a folder"),
        ("hydra.run.dir=${hydra.job.num}", "hydra.run.dir: "),
        ("hydra.verbose=true", "hydra.verbose: not used by attnkit"),
        ("hydra.job.chdir=true", "hydra.job.chdir: not used by attnkit"),
        ("hydra.searchpath=[x]", "hydra.searchpath: not used by attnkit"),
        ("hydra/job_logging=default", "hydra/job_logging: not used by attnkit"),
    ],
)
def test_what_means_nothing_or_contradicts(attnkit, argv, message):
    done = attnkit(*argv.split())
    assert done.code == 2, done.out
    assert message in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert list(Path.cwd().iterdir()) == []


def test_a_study_needs_numbered_folders(mine):
    pytest.importorskip("optuna")
    done = mine("-m", "hydra/sweeper=optuna", "module.lr=0.1,0.2", "hydra.sweep.subdir=a")
    assert done.code == 2
    assert "${hydra.job.num}" in done.err


def test_no_file_may_name_folders(attnkit, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text(
        "# @package _global_\nhydra: {sweep: {subdir: x}}\n"
    )
    done = attnkit("--config-dir", tmp_path, "task=vit", "experiment=x")
    assert done.code == 2
    assert "hydra.sweep: set in a file" in done.err


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
