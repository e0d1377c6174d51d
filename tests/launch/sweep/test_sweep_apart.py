"""Sweeps whose trials are processes of their own, and sweeps that are killed."""

import json
import os
import signal
import statistics
from pathlib import Path

import pytest

from attnkit.launch.processes import gpus as devices
from attnkit.launch.sweep import launchers
from attnkit.launch.sweep import record as trials

QUICK = (
    "task=vit", "model.dim=16", "model.depth=1", "model.num_heads=2", "trainer=cpu",
    "trainer.limit_batches=2", "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip
LAUNCHERS = [
    ("joblib", "hydra.launcher.n_jobs=2"),
    pytest.param("submitit_local", None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("launcher", "setting"), LAUNCHERS)
def test_launchers(attnkit, found, hers, monkeypatch, launcher, setting):
    """Three trials at once on two devices: one of them fails, none shares a device."""
    monkeypatch.setenv(devices.VARIABLE, "7,8")  # on which no test can find a GPU
    done = attnkit(
        "--config-dir", hers, "-m", "task=mine", "module.fail_at=null,99,0",
        "trainer.accelerator=auto", "trainer.max_epochs=15", "callbacks.curves=null",
        "logger.tensorboard=null", "+callbacks.seen._target_=mine_of_the_tests.Seen",
        f"hydra/launcher={launcher}", *([setting] if setting else []), "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 1, done.err
    assert found.states("sweep") == ["done", "done", "failed"]
    assert [row["rank"] for row in found.rows("sweep")] == ["1", "2", ""]
    assert "fails on purpose" in found.rows("sweep")[2]["error"]
    ended = trials.read_sweep(Path("sweep")).trials
    assert [found.starts(trial) for trial in ended] == [["train"]] * 3
    assert {path.name for path in Path.cwd().iterdir()} == {"sweep"}
    folders = {path.name for path in Path("sweep").iterdir() if path.is_dir()}
    assert folders - {".submitit"} == {trial.folder.name for trial in ended}

    seen = [json.loads((trial.folder / "seen.json").read_text()) for trial in ended[:2]]
    assert {one["device"] for one in seen} <= {"7", "8"}
    assert len({one["pid"] for one in seen} | {os.getpid()}) == 3
    (start, end), (other_start, other_end) = (one["time"] for one in seen)
    if max(start, other_start) < min(end, other_end):
        assert seen[0]["device"] != seen[1]["device"]


def test_what_is_not_installed_is_named(attnkit, monkeypatch):
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    for name, extra in (("joblib", "joblib"), ("submitit_slurm", "submitit")):
        done = attnkit("-m", "seed=1,2", f"hydra/launcher={name}")
        assert (done.code, len(done.err.splitlines())) == (2, 2)
        assert f"pip install 'attnkit[{extra}]'" in done.err


def test_slurm_is_composed_and_looked_for(attnkit, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PATH", "")
    slurm = ("-m", "seed=1,2", "hydra/launcher=submitit_slurm")
    done = attnkit(*slurm, "hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=60")
    assert done.code == 2
    assert "no SLURM here (no command sbatch)" in done.err
    done = attnkit(*slurm, "hydra.launcher.partitoin=gpu")
    assert "hydra.launcher.partitoin: hydra.launcher has no such setting" in done.err
    done = attnkit(*slurm, "hydra.launcher.timeout_min=long")
    assert "hydra.launcher.timeout_min=long: Value 'long'" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "signum"),
    [("joblib", signal.SIGINT), ("submitit_local", signal.SIGINT), ("joblib", signal.SIGTERM)],
)
def test_a_signal_ends_the_steps_of_all(attnkit, found, start, launcher, signum):
    """The terminal's Ctrl-C reaches every process of the group, a SIGTERM only the command."""
    command = start(
        "-m", *QUICK, "trainer.max_epochs=100000", "seed=1,2,3", f"hydra/launcher={launcher}",
        *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []), "run_dir=sweep",
    )  # fmt: skip
    running = 2 if launcher == "joblib" else 3
    command.when(lambda: len(list(Path("sweep").glob("*/checkpoints/last.ckpt"))) == running)
    if signum == signal.SIGINT:
        os.killpg(command.process.pid, signum)
    else:
        command.send(signum)
    done = command.done()
    assert done.code == (130 if signum == signal.SIGINT else 143), done.out
    assert "the trials end their steps" in done.out
    assert f"hydra/launcher={launcher}" in done.out.splitlines()[-1]
    waits = "waiting" if launcher == "joblib" else "interrupted"
    assert found.states("sweep") == ["interrupted", "interrupted", waits]
    assert start.left() == {}


@pytest.mark.slow
def test_a_trial_that_is_killed_fails_alone(attnkit, found, start):
    command = start(
        "-m", *QUICK, "trainer.max_epochs=60", "seed=1,2,3", "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2", "run_dir=sweep",
    )  # fmt: skip
    command.when(lambda: list(Path("sweep").glob("1_*/checkpoints/last.ckpt")))
    holder = Path("sweep/.1.lock").read_text()
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    done = command.done()
    assert done.code == 1, done.out
    assert found.states("sweep") == ["done", "failed", "done"]
    (_, failed) = found.rows("sweep")  # the two seeds that are done are one row
    assert "killed by SIGKILL" in failed["error"]
    done = attnkit("run=retry", "sweep=sweep", "hydra/launcher=basic")
    assert done.code == 0, done.err
    assert found.states("sweep") == ["done"] * 3
    assert "train, going on" in found.starts(trials.read_sweep(Path("sweep")).trials[1])


@pytest.mark.slow
def test_twelve_trials_killed_resumed_and_retried(found, start):
    """Two of them fail in training, of a learning rate that makes the loss NaN."""
    command = start(
        "-m", *QUICK, "trainer.max_epochs=6", "seed=0,1",
        "optimizer.lr=1e-3,2e-3,4e-3,1e30,8e-3,2e-2", "run_dir=sweep",
    )  # fmt: skip
    command.when(lambda: list(Path("sweep").glob("5_*/checkpoints/last.ckpt")))
    os.killpg(command.process.pid, signal.SIGKILL)
    command.done()
    before = found.states("sweep")
    assert before[:4] == ["done"] * 3 + ["failed"]
    assert before[5:] == ["interrupted"] + ["waiting"] * 6

    both = [start("-m", "resume=sweep") for _ in range(2)]  # at the same time
    done = [command.done() for command in both]
    assert {one.code for one in done} == {1}, [one.out for one in done]
    states = ["failed" if number in (3, 9) else "done" for number in range(12)]
    assert found.states("sweep") == states

    assert start("run=retry", "sweep=sweep").done().code == 1
    sweep = trials.read_sweep(Path("sweep"))
    assert [trial.state for trial in sweep.trials] == states
    for trial in sweep.trials:
        going_on = ["train", "train, going on"]
        starts = found.starts(trial)
        if trial.state == "failed":
            assert len(starts) == 2
            assert len(trial.errors) == 1
            assert "NaN" in trial.error or "nan" in trial.error or "inf" in trial.error
        else:
            assert starts == (going_on if trial.number == 5 else ["train"])
            assert len(found.steps(trial)) == len(set(found.steps(trial))) == 6

    by_hand = []
    for path in Path("sweep").glob("*/results.json"):
        results = json.loads(path.read_text())
        if "num_seeds" in results:
            number = path.parent.name.partition("_")[0]
            by_hand.append((results["val/loss_best"], number, results["test/accuracy"]))
    by_hand.sort()
    rows = found.rows("sweep", "trials.csv")
    assert len(rows) == 12
    table = [(float(r["val/loss_best"]), r["trial"], float(r["test/accuracy"])) for r in rows[:10]]
    assert table == by_hand
    assert [row["trial"] for row in rows[10:]] == ["3", "9"]

    settings = {}  # the same over the two seeds
    for value, number, _ in by_hand:
        settings.setdefault(int(number) % 6, []).append(value)
    means = sorted((statistics.fmean(v), statistics.stdev(v)) for v in settings.values())
    names = ("val/loss_best", "val/loss_best_std")
    rows = [[float(row[name]) for name in names] for row in found.rows("sweep")[:5]]
    assert rows == [pytest.approx(figures, rel=1e-9) for figures in means]
