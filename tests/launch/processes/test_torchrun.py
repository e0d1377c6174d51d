"""Ranks that somebody else starts: torchrun, and srun as far as its variables go."""

import csv
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from attnkit.launch.processes.locks import is_locked
from attnkit.launch.processes.torchrun import launched

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def epochs_of(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["epoch"]) for row in csv.DictReader(file) if row["val/loss"]]


@pytest.fixture
def srun(start, unused_job):
    """Simulated: two processes with the variables that srun sets, and how they end."""

    def run(*argv: object, second: tuple[object, ...] = (), late=lambda: True):
        shared = {
            "SLURM_JOB_ID": unused_job, "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
            "SLURM_NODELIST": "127.0.0.1", "SLURM_STEP_ID": "0",
        }  # fmt: skip
        first = start(*argv, SLURM_PROCID="0", SLURM_LOCALID="0", **shared).when(late)
        other = start(*argv, *second, SLURM_PROCID="1", SLURM_LOCALID="1", **shared)
        return first.done(), other.done()

    return run


@pytest.fixture
def unused_job() -> str:
    """A job number whose port, which Lightning makes of it, nobody uses."""
    for number in range(1000, 9999):
        with socket.socket() as one:
            try:
                one.bind(("", 15000 + number))
            except OSError:
                continue
            return f"7{number}"
    raise AssertionError("no port is free")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"SLURM_STEP_ID": "0"}, "srun"),
        ({}, None),  # the script of a batch job: srun would start two
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "interactive"}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
    ],
)
def test_who_has_started_this_process(monkeypatch, capsys, given, name):
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train.sh", "SLURM_NTASKS": "2"}
    for key, value in {**batch, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", **given}.items():
        monkeypatch.setenv(key, value)
    found = launched()
    assert (found and (found.name, found.rank, found.world)) == (name and (name, 0, 2))
    assert ("SLURM_NTASKS" in os.environ) == (name is not None)  # Lightning reads it, too
    said = "this is one process, but SLURM's job has 2 tasks; srun attnkit … starts all\n"
    assert capsys.readouterr().err == ("" if given else said)


@pytest.mark.slow
def test_torchrun(start, unruly):
    done = start(
        *unruly, "trainer=cpu_ddp", "trainer.max_epochs=2", "seeds=2", "run_dir=run",
        launch=TORCHRUN,
    ).done()  # fmt: skip
    assert done.code == 0, done.out
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]
    assert results_of(Path("run"))["num_seeds"] == 2
    assert [epochs_of(Path(f"run/seed_{seed}")) for seed in (0, 1)] == [[1, 2], [1, 2]]
    assert start.left() == {}


@pytest.mark.slow
def test_a_rank_that_comes_late_finds_the_folder_held(srun, start, unruly):
    """By the first rank of its own run, which is no reason to refuse."""
    run = start(*unruly, "trainer=cpu", "trainer.max_epochs=1", "run_dir=run").done()
    assert run.code == 0, run.out
    more = (*unruly[:2], "resume=run", "trainer=cpu_ddp", "trainer.max_epochs=2")
    first, second = srun(*more, late=lambda: is_locked(Path("run/.lock")))
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert epochs_of(Path("run")) == [1, 2]


REFUSED = [
    (("trainer.max_epochz=2",), "trainer.max_epochz: lightning.Trainer has no such key"),
    (("trainer=cpu",), "trainer: 1 devices × 1 nodes, but srun has started 2 processes"),
    (("-m", "module.lag=0,1"), "-m: not under srun"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_a_refusal_is_said_once(srun, unruly, argv, message):
    first, second = srun(*unruly, "trainer=cpu_ddp", "run_dir=run", *argv)
    assert (first.code, second.code) == (2, 2), first.out + second.out
    assert message in first.out
    assert len(first.out.strip().splitlines()) <= 3
    assert second.out == ""
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_srun(srun, unruly):
    first, second = srun(*unruly, "trainer=cpu_ddp", "trainer.max_epochs=2", "run_dir=run")
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert second.out == ""
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]
    assert epochs_of(Path("run")) == [1, 2]
    assert results_of(Path("run"))["steps"] == 8


@pytest.mark.slow
def test_srun_when_a_rank_fails(srun, unruly):
    first, second = srun(*unruly, "trainer=cpu_ddp", "module.how=raise", "run_dir=run")
    assert (first.code, second.code) == (1, 1)
    assert "attnkit: another process of this run has ended" in first.out
    assert "attnkit: rank 1: RuntimeError: fails on purpose" in second.out


@pytest.mark.slow
def test_what_is_wrong_in_one_rank_alone_is_said_by_it(srun, unruly):
    """Its node lacks a file, say; the first rank can't know, and waits for it in vain."""
    first, second = srun(
        *unruly, "trainer=cpu_ddp", "trainer.timeout_seconds=4", "run_dir=run",
        second=("trainer.max_epochz=2",),
    )  # fmt: skip
    assert (first.code, second.code) == (1, 2), first.out + second.out
    (line, *_) = second.out.splitlines()
    assert line.startswith("attnkit: rank 1: trainer.max_epochz: lightning.Trainer has no such key")


@pytest.mark.slow
def test_options_that_run_nothing_are_answered_once(srun):
    first, second = srun("--version")
    assert (first.code, second.code) == (0, 0)
    assert first.out.startswith("attnkit ")
    assert second.out == ""
