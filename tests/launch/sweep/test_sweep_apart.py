"""Sweeps whose trials are processes of their own, and sweeps that are killed."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit.launch.config.compose import Composer
from attnkit.launch.processes.process import command_of
from attnkit.launch.sweep import launchers
from attnkit.launch.sweep import record as trials
from attnkit.launch.sweep.trials import Order
from attnkit.lightning.resume import checkpoints

QUICK = (
    "task=vit", "model.dim=16", "model.depth=1", "model.num_heads=2", "trainer=cpu",
    "trainer.limit_batches=2", "callbacks.curves=null", "logger.tensorboard=null",
)  # fmt: skip
LAUNCHERS = [("joblib", "hydra.launcher.n_jobs=2"), ("submitit_local", None)]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "setting"), LAUNCHERS)
def test_launchers(attnkit, found, hers, monkeypatch, launcher, setting):
    """Three trials, two of which wait for each other while they train; the third one fails."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8")  # on which no test can find a GPU
    monkeypatch.setenv("ATTNKIT_TRACEBACK", "1")
    if launcher == "joblib" or sys.version_info >= (3, 11):  # submitit's processes: python -m
        Path("statistics.py").write_text("raise SystemExit('the one here was imported')")
    done = attnkit(
        "--config-dir", hers, "-m", "task=mine", "module.fail_at=null,99,0",
        "trainer.accelerator=auto", "callbacks.curves=null", "logger.tensorboard=null",
        "+callbacks.seen._target_=mine_of_the_tests.Seen", "+callbacks.seen.others=1",
        f"hydra/launcher={launcher}", *([setting] if setting else []), "run_dir=sweep",
    )  # fmt: skip
    assert done.code == 1, done.err
    assert found.states("sweep") == ["done", "done", "failed"]
    assert [row["rank"] for row in found.rows("sweep")] == ["1", "2", ""]
    assert "fails on purpose" in found.rows("sweep")[2]["error"]
    ended = trials.read_sweep(Path("sweep")).trials
    assert [found.starts(trial) for trial in ended] == [["train"]] * 3
    assert {path.name for path in Path.cwd().iterdir()} - {"statistics.py"} == {"sweep"}
    folders = {path.name for path in Path("sweep").iterdir() if path.is_dir()}
    assert folders - {".submitit"} == {trial.folder.name for trial in ended}
    printed = (ended[2].folder / "output.log").read_text()  # all of it is kept
    assert "Traceback (most recent call last)" in printed
    assert "in training_step" in printed
    assert "this module fails on purpose" in printed

    seen = [json.loads((trial.folder / "seen.json").read_text()) for trial in ended[:2]]
    assert {one["device"] for one in seen} == {"7", "8"}  # at the same time, so not the same one
    assert len({one["pid"] for one in seen} | {os.getpid()}) == 3


@pytest.mark.slow
def test_ranks_of_a_trial_in_a_batch_job(found, unruly):
    """The variables of SLURM's one task are not those of the two ranks that the trial starts."""
    composer = Composer(Path(unruly[1]))
    overrides = (*unruly[2:], "trainer=cpu_ddp", "trainer.max_epochs=1")
    folder = Path("sweep").absolute()
    folder.mkdir()
    trial = trials.new_trial(folder, (), 0, overrides)
    sweep = trials.Sweep(folder, overrides, (), (trial,), working_dir=str(Path.cwd()))
    trials.write_sweep(sweep)
    slurm = {
        "SLURM_JOB_ID": "71234", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1",
    }  # fmt: skip
    order = pickle.dumps(Order.of(composer, trial, ()))
    words = command_of("attnkit.launch.sweep.trials")
    done = subprocess.run(words, env={**os.environ, **slurm}, input=order, capture_output=True)
    said = (done.stdout + done.stderr).decode()
    assert (done.returncode, found.states(folder)) == (0, ["done"]), said
    assert json.loads((trial.folder / "results.json").read_text())["steps"] == 4


def test_what_is_not_installed_is_named(attnkit, monkeypatch):
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    done = attnkit("-m", "seed=1,2", "hydra/launcher=submitit_slurm")
    assert (done.code, len(done.err.splitlines())) == (2, 2)
    assert "pip install 'attnkit[submitit]'" in done.err


@pytest.mark.parametrize(
    ("launcher", "setting", "message"),
    [
        ("submitit_slurm", "partition=gpu", "no SLURM here (no command sbatch)"),
        ("submitit_slurm", "timeout_min=long", "timeout_min: expected int, got 'long'"),
        ("submitit_slurm", "tasks_per_node=4", "a trial is one task, which starts its own ranks"),
        ("submitit_local", "partition=gpu", "has no such key; it has cpus_per_task"),
        ("joblib", "n_jobs=0", "expected 1 or more, or -1 for all CPUs"),
        ("joblib", "n_jobs=1,2", "expected one value"),
        ("submitit_local", "name=${task}", "expected a value, not an interpolation"),
        ("basic", "n_jobs=2", "hydra/launcher=basic has no such key"),
    ],
)
def test_wrong_settings(refused, monkeypatch, launcher, setting, message):
    monkeypatch.setenv("PATH", "")
    command = (f"hydra/launcher={launcher}", f"hydra.launcher.{setting}")
    refused(message, "-m", "task=vit", "seed=1,2", *command)


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
def test_a_trial_that_is_killed_fails_alone(attnkit, found, start, hers):
    """It kills itself, in the epoch that is its seed; the others have no such epoch."""
    done = start(
        "--config-dir", hers, "-m", "task=mine", *QUICK[-1:], "seed=3,1,2",
        "+callbacks.kill._target_=mine_of_the_tests.KillAt", "+callbacks.kill.epoch=${seed}",
        "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "run_dir=sweep",
    ).done()  # fmt: skip
    assert done.code == 1, done.out
    assert found.states("sweep") == ["done", "failed", "done"]
    (_, failed) = found.rows("sweep")  # the two seeds that are done are one row
    assert "killed by SIGKILL" in failed["error"]
    again = ("run=retry", "sweep=sweep", "callbacks.kill=null", "hydra/launcher=basic")
    done = attnkit("--config-dir", hers, *again)
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
    (last,) = Path("sweep").glob("5_*/checkpoints/last.ckpt")
    killed_after = checkpoints.load(last)["global_step"]
    before = found.states("sweep")
    assert before[:4] == ["done"] * 3 + ["failed"]
    assert before[5:] == ["interrupted"] + ["waiting"] * 6

    done = start("-m", "resume=sweep").done()
    assert done.code == 1, done.out
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
            steps = found.steps(trial)
            assert len(steps) == len(set(steps))
            # Lightning logs an epoch after its checkpoint: a kill between the two costs that row.
            lost = {2, 4, 6, 8, 10, 12} - set(steps)
            assert lost <= ({killed_after} if trial.number == 5 else set())


STUB = """\
import os, pickle, sys, time
from pathlib import Path
trial = pickle.load(sys.stdin.buffer).trial
device = os.environ["CUDA_VISIBLE_DEVICES"]
lock = trial.folder.with_name(device + ".held")
lock.open("x").close()  # an error where another trial has it
time.sleep(0.05)
lock.unlink()
trial.folder.with_name(f"{trial.number}.device").write_text(device)
"""


@pytest.mark.parametrize(("many", "sharing"), [(4, True), (1, False)])
def test_trials_at_once_share_out_the_gpus(monkeypatch, found, many, sharing):
    """Six trials on two GPUs: each has one for itself, or sees both where it takes none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8")
    monkeypatch.setattr(launchers, "command_of", lambda *_: [sys.executable, "-c", STUB])
    folder = Path("sweep").absolute()
    made = [trials.new_trial(folder, (), number, ()) for number in range(6)]
    folder.mkdir()
    sweep = trials.Sweep(folder, (), (), tuple(made), working_dir=str(Path.cwd()))
    trials.write_sweep(sweep)
    launchers.Joblib(many).run([Order(trial, None, sharing) for trial in made])
    assert found.states(folder) == ["waiting"] * 6  # none has failed
    seen = [(folder / f"{number}.device").read_text() for number in range(6)]
    assert set(seen) == ({"7", "8"} if sharing else {"7,8"})
