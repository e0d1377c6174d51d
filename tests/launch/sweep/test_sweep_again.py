"""Sweeps that are killed, resumed and retried: every trial runs once, whatever happens."""

import copy
import fcntl
import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnkit.launch.config.compose import Composer, readable, task_config
from attnkit.launch.errors import Interrupted
from attnkit.launch.processes.locks import locked
from attnkit.launch.sweep import launchers
from attnkit.launch.sweep import record as trials
from attnkit.launch.sweep.record import new_trial, progress
from attnkit.launch.sweep.start import _combinations
from attnkit.launch.sweep.trials import Order, orders_of, run_here
from attnkit.lightning import UserError


@contextmanager
def held_elsewhere(lock):
    """As another process holds a lock: by a file of its own."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on elsewhere\n")
        file.flush()
        yield


# --- the record -----------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path):
    """A sweep of five trials, one in each state but running."""
    made = [
        trials.new_trial(tmp_path, ["model.depth"], number, [f"model.depth={number}"])
        for number in range(4)
    ]
    trials.write_sweep(
        trials.Sweep(tmp_path, ("model.depth=0,1,2,3",), ("model.depth",), tuple(made))
    )
    for trial in made[:3]:
        trial.folder.mkdir()
    (made[0].folder / "results.json").write_text('{"num_seeds": 1, "val/loss_best": 0.5}')
    (made[0].folder / "state.json").write_text('{"state": "done"}')
    (made[1].folder / "error.txt").write_text("went wrong\n")
    (made[2].folder / "config.yaml").write_text("task: vit\n")
    return tmp_path


def test_each_state_is_found(record, found):
    sweep = trials.read_sweep(record)
    assert found.states(record) == ["done", "failed", "interrupted", "waiting"]
    assert sweep.trials[0].results["val/loss_best"] == 0.5
    assert sweep.trials[1].error == "went wrong"
    assert sweep.trials[3].folder == record / "3_model.depth=3"
    assert sweep.trials[3].values == {"model.depth": "3"}
    with held_elsewhere(sweep.trials[2].lock):
        assert found.states(record)[2] == "running"
    assert found.states(record)[2] == "interrupted"
    # the results of one seed are not those of the job
    (record / "3_model.depth=3" / "seed_0").mkdir(parents=True)
    (record / "3_model.depth=3" / "seed_0" / "results.json").write_text('{"num_seeds": 1}')
    assert found.states(record)[3] == "interrupted"


def test_two_sweeps_do_not_share_a_folder(record, refused):
    with pytest.raises(UserError, match="another sweep has just begun there"):
        trials.write_sweep(trials.read_sweep(record))
    assert len(trials.read_sweep(record).trials) == 4
    before = {path: path.read_bytes() for path in record.rglob("*") if path.is_file()}
    with held_elsewhere(record / ".sweep.lock"):
        for key, *command in (("resume", "-m"), ("sweep", "run=retry")):
            refused(
                f"{key}: {record} is in use by process 7 on elsewhere", *command, f"{key}={record}"
            )
    (record / ".sweep.lock").unlink()
    assert {path: path.read_bytes() for path in record.rglob("*") if path.is_file()} == before


def test_trials_are_appended(record):
    added = trials.add_trial(record, ["model.depth=9"])
    there = trials.read_sweep(record).trials
    assert [trial.number for trial in there] == list(range(5))
    assert there[4] == added
    assert added.values == {"model.depth": "9"}


def test_a_lock_alone_is_no_beginning(record, found):
    """Nor is what a process of its own has printed before it did anything."""
    folder = trials.read_sweep(record).trials[3].folder
    with held_elsewhere(folder / ".lock"):
        assert found.states(record)[3] == "running"
    (folder / trials.OUTPUT).touch()
    assert found.states(record)[3] == "waiting"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, this attnkit reads version 1"),
        ({"keys": "x"}, "keys: expected texts"),
        ({"trials": [{"number": 0, "folder": "../x", "overrides": []}]}, "folder: expected a name"),
        ({"trials": [{"number": 0, "folder": "", "overrides": []}]}, "folder: expected a name"),
        ({"trials": [{"number": 1, "folder": "x", "overrides": []}]}, "expected this number"),
        ({"trials": [{"number": 0, "folder": "x", "overrides": ["+allow=[os]"]}]}, "is not for"),
        ({"trials": [{"number": 0, "folder": "x", "overrides": ["hydra.job.x=1"]}]}, "is not for"),
    ],
)
def test_a_record_of_a_strangers(record, change, message):
    content = json.loads((record / "sweep.json").read_text())
    (record / "sweep.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UserError, match=re.escape(message)):
        trials.read_sweep(record)


def test_who_only_looks_keeps_nobody_from_a_lock(tmp_path):
    """As `is_locked` does, in a process that the system then leaves waiting."""
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.5, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with locked(path) as mine:
            assert mine
    with held_elsewhere(path), locked(path) as mine:
        assert not mine


# --- resume and retry -----------------------------------------------------------------------------


@pytest.fixture
def halted(mine):
    """A sweep that Ctrl-C ended in its third trial."""
    done = mine(
        "-m", "module.interrupt_at=null,1", "module.fail_at=null,0", "trainer.max_epochs=2",
        "callbacks.curves=null", "callbacks.steps.cost=false", "logger.tensorboard=null",
        "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 130, done.err
    return done


@pytest.mark.slow
def test_resume_and_retry(halted, attnkit, refused, found, hers):
    assert "the trials after it were not started" in halted.err
    again = f"attnkit -m resume={Path('sweep').absolute()} --config-dir {hers}"
    assert f"to go on: {again}" in halted.err
    assert found.states("sweep") == ["done", "failed", "interrupted", "waiting"]

    # given where a run is wanted
    for argv, message in (
        (["resume=sweep"], f"a sweep: -m resume={Path('sweep').absolute()}"),
        (["run=export", "ckpt=sweep"], "a sweep: give the folder of one of its trials"),
    ):
        refused(message, *argv)

    # what is not given again, and what can't change
    for argv, message in (
        (["resume=sweep"], f"was started with {hers}; give it again"),
        (["resume=sweep", "module.lr=3"], "module.lr=3: can't be changed when a sweep is resumed"),
        (["resume=sweep", "seed=1,2"], "seed=1,2: can't be changed when a sweep is resumed"),
        (["resume=sweep/0_x"], "no folder"),
        (["resume=nowhere"], "resume: no folder"),
        (["resume=."], "no sweep in"),
    ):
        done = attnkit("-m", *argv)
        assert (done.code, len(done.err.strip().splitlines()) <= 3) == (2, True), done.err
        assert message in done.err

    # the third would interrupt again: the cause is removed, as somebody who edits a file would
    third = trials.read_sweep(Path("sweep")).trials[2].folder / "config.yaml"
    third.write_text(third.read_text().replace("interrupt_at: 1", "interrupt_at: null"))
    content = Path("sweep/sweep.json").read_text()
    edited = content.replace('"module.interrupt_at=1"', '"module.interrupt_at=null"')
    Path("sweep/sweep.json").write_text(edited)
    before = {path: path.stat().st_mtime_ns for path in Path("sweep").glob("[01]_*/*")}
    with held_elsewhere(trials.read_sweep(Path("sweep")).trials[3].lock):
        done = attnkit("--config-dir", hers, "-m", "resume=sweep")
        assert done.code == 1, done.err
        assert "1 of 4 trials" in done.out
        assert "trial 3 is run by process 7 on elsewhere" in done.out
        assert "1 running; to go on: attnkit -m resume=" in done.out
        assert found.states("sweep") == ["done", "failed", "done", "running"]
    done = attnkit("--config-dir", hers, "-m", "resume=sweep")
    assert "1 of 4 trials" in done.out
    assert found.states("sweep") == ["done", "failed", "done", "failed"]
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert [row["trial"] for row in found.rows("sweep")] == ["0", "2", "1", "3"]
    ended = trials.read_sweep(Path("sweep")).trials
    starts = [["train"], ["train"], ["train", "train, going on"], ["train"]]
    assert [found.starts(trial) for trial in ended] == starts
    assert found.steps(ended[2]) == found.steps(ended[0])

    # nothing is left to go on with: only the table
    done = attnkit("--config-dir", hers, "-m", "resume=sweep")
    assert "0 of 4 trials" in done.out
    assert [found.starts(trial) for trial in ended] == starts

    # changes that a run which goes on may have, and the error before is kept
    done = attnkit("--config-dir", hers, "run=retry", "sweep=sweep", "trainer.max_epochs=1")
    assert done.code == 1
    again = trials.read_sweep(Path("sweep")).trials
    assert [len(found.starts(trial)) for trial in again] == [1, 2, 2, 2]
    assert [len(trial.errors) for trial in again] == [0, 1, 0, 1]
    assert again[1].overrides[-1] == "trainer.max_epochs=1"
    assert len(found.rows("sweep")) == 4


def test_glob_takes_the_choices_of_a_group():
    found = _combinations(Composer(None), ["optimizer=glob(ad*)", "seed=1,2"])
    assert found == [[f"optimizer={o}", f"seed={s}"] for o in ("adam", "adamw") for s in (1, 2)]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("ckpt=s/1_model.depth=2", "ckpt='s/1_model.depth=2'"),
        ("resume=s/0_a=b_c=d", "resume='s/0_a=b_c=d'"),
        ("ckpt=s/run", "ckpt=s/run"),
        ("ckpt=s/1_a=1,b.c=0.5", "ckpt='s/1_a=1,b.c=0.5'"),
        ("ckpt=s/1_a=1,t/2_b=1", "ckpt=s/1_a=1,t/2_b=1"),  # not there: two to sweep over
        ('ckpt="s/a=b"', 'ckpt="s/a=b"'),
        ("ckpt='a=b','c=d'", "ckpt='a=b','c=d'"),
        ("model.x=a=b", "model.x=a=b"),
    ],
)
def test_paths_of_trials_are_readable_as_they_are_typed(typed, read):
    Path("s/1_a=1,b.c=0.5").mkdir(parents=True)
    assert readable(typed) == read


# --- devices --------------------------------------------------------------------------------------

LISTED = """\
GPU 0: NVIDIA A100 (UUID: GPU-0a1b)
  MIG 1g.5gb Device 0: (UUID: MIG-c2d3)
  MIG 1g.5gb Device 1: (UUID: MIG-e4f5)
GPU 1: NVIDIA A100 (UUID: GPU-6a7b)
"""


def test_the_names_of_devices(monkeypatch):
    assert launchers.listed_gpus(LISTED) == ("MIG-c2d3", "MIG-e4f5", "GPU-6a7b")
    for given, expected in (("0,1", ("0", "1")), ("", ()), ("3, GPU-1,-1,2", ("3", "GPU-1"))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert launchers.visible_gpus() == expected


def test_a_key_that_is_gone_may_be_deleted_again():
    """As by a trial that is tried again with what it was given, or a run that goes on twice."""
    composer = Composer()
    once = composer.compose(["task=vit", "~callbacks.found"])
    twice = composer.compose(["task=vit", "~callbacks.found", "~callbacks.found"])
    assert "found" not in twice.callbacks
    assert task_config(once) == task_config(twice)
    saved = OmegaConf.to_container(task_config(once), resolve=False)
    assert "found" not in composer.overlay(saved, ["~callbacks.found"]).callbacks
    with pytest.raises(UserError, match=r"~callbacks.fund: there is no such key; did you mean"):
        composer.compose(["task=vit", "~callbacks.fund"])


@pytest.mark.slow
def test_a_trial_that_a_batch_system_starts_again_goes_on(found, hers):
    """What was decided before it first started says nothing of its checkpoint."""
    folder = Path("sweep").absolute()
    words = ["task=mine", "+callbacks.sent._target_=mine_of_the_tests.StopAt",
             "+callbacks.sent.batch=4", "logger.tensorboard=null"]  # fmt: skip
    trial = trials.new_trial(folder, (), 0, words)
    order = Order.of(Composer(hers), trial, ())
    with pytest.raises(Interrupted):
        run_here(copy.deepcopy(order))
    assert trial.now().state == "interrupted"
    run_here(order)
    assert trial.now().state == "done"
    assert found.starts(trial) == ["train", "train, going on"]
    assert found.steps(trial) == [5, 10]


def test_no_late_job_tries_a_trial_twice(record):
    trial = trials.read_sweep(record).trials[1]
    (trial.folder / "state.json").write_text('{"state": "failed"}')
    for before, is_open in (
        (len(trial.errors), True),
        (len(trial.errors) - 1, False),
        (None, False),
    ):
        assert Order(trial, None, attempts=before).is_open == is_open


SMALL = ["task=vit", "model.dim=16", "model.num_heads=2", "trainer=cpu"]


def plant(trial, config):
    """A checkpoint, with which a trial goes on, and what the trial is then said to be."""
    (trial.folder / "checkpoints").mkdir(parents=True)
    (trial.folder / "checkpoints" / "last.ckpt").touch()
    (trial.folder / "config.yaml").write_text(config)


def test_a_trial_that_cannot_be_decided_fails_alone(tmp_path, capsys):
    broken, whole = (new_trial(tmp_path, (), number, SMALL) for number in range(2))
    plant(broken, ": [")
    for attempts in range(2):  # tried again, the error before is kept
        (order,) = orders_of(Composer(), [broken, whole], [])
        assert order.trial == whole
        assert "config.yaml: not valid YAML" in capsys.readouterr().err
        assert progress(broken.folder) == "failed"
        assert len(broken.errors) == attempts


def test_what_goes_on_after_all_is_decided_anew(tmp_path, capsys):
    trial = new_trial(tmp_path, (), 0, SMALL)
    order = Order.of(Composer(), trial, [])
    hostile = OmegaConf.create(order.job.config)
    hostile.trainer = {"_target_": "os.system", "command": "id"}
    plant(trial, OmegaConf.to_yaml(hostile))
    run_here(order)
    assert "os.system is outside the allowed packages" in capsys.readouterr().err
    assert progress(trial.folder) == "failed"


@pytest.mark.parametrize(
    ("words", "takes_one"),
    [
        (["trainer=auto"], True),
        (["trainer=gpu"], True),
        (["trainer=ddp"], False),  # takes all
        (["trainer=cpu"], False),
        (["trainer=auto", "trainer.devices=1"], False),  # typed: it is not to be shared out
    ],
)
def test_which_trials_share_the_gpus_out(tmp_path, words, takes_one):
    trial = new_trial(tmp_path, (), 0, ["task=vit", *words])
    assert Order.of(Composer(), trial, []).one_gpu is takes_one
