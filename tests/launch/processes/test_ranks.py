"""Several processes: told of signals, none left behind, and one clear line when one goes wrong."""

import csv
import gc
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning import LightningDataModule, LightningModule

from attnkit.launch.processes import ranks

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def epochs_of(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["epoch"]) for row in csv.DictReader(file) if row["val/loss"]]


def said(done) -> list[str]:
    lines = done.err.strip().splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("attnkit:")) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "lines"),
    [
        ("kill", 1, ["attnkit: rank 1: killed by SIGKILL", "  the system kills processes"]),
        (
            "raise",
            1,
            ["attnkit: rank 1: RuntimeError: fails on purpose", "  in mischief.py:"],
        ),
        (
            "user",
            2,
            ["attnkit: rank 1: settings.txt: wrong on purpose", "  expected something right"],
        ),
        (
            "hang",
            1,
            ["attnkit: rank 1 does not answer", "  trainer.timeout_seconds sets how"],
        ),
    ],
)
def test_one_line_says_which_rank_went_wrong(attnkit, unruly, how, code, lines):
    done = attnkit(
        *unruly, "trainer=cpu_ddp", "trainer.timeout_seconds=4", f"module.how={how}", "run_dir=run"
    )
    assert done.code == code, done.err
    found = said(done)
    assert len(found) <= 3
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=False)), found
    if code == 2:  # refused before there was anything to keep
        assert not Path("run").exists()
        return
    log = Path("run/run.log").read_text()
    assert lines[0].removeprefix("attnkit: ") in log
    if how == "raise":  # what the other rank saw and said is not lost
        assert "rank 1: UserWarning mischief.py" in log
        assert 'mischief.py", line' in log


@linux
@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", "cpu_ddp"])
def test_nobody_outlives_the_command(start, unruly, trainer):
    started = start(
        *unruly, f"trainer={trainer}", "module.lag=0.1", "trainer.max_epochs=1000", "run_dir=run",
        "data.workers=1",
    )  # fmt: skip
    started.when(lambda: Path("run/metrics.csv").is_file() and len(epochs_of(Path("run"))) > 0)
    assert len(start.left()) > 1
    started.send(signal.SIGKILL)
    last = time.monotonic() + 15
    while start.left() and time.monotonic() < last:
        time.sleep(0.2)
    assert start.left() == {}


SIGNALS = [
    (trainer, *signal)
    for signal in (("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143))
    for trainer in ("cpu", "cpu_ddp")
]


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "name", "code"), SIGNALS)
def test_signal_in_training(attnkit, start, unruly, trainer, name, code):
    started = start(
        *unruly, f"trainer={trainer}", "module.lag=0.1", "trainer.max_epochs=5", "run_dir=run"
    )
    started.when(lambda: Path("run/metrics.csv").is_file() and len(epochs_of(Path("run"))) > 0)
    done = started.send(getattr(signal, name)).done()
    assert done.code == code, done.out
    assert f"stopped by {name} after step " in done.out
    assert f"to go on: attnkit resume={Path('run').absolute()} --config-dir" in done.out
    assert "Traceback" not in done.out
    assert start.left() == {}
    assert epochs_of(Path("run")) != [1, 2, 3, 4, 5]
    done = attnkit(*unruly[:2], "resume=run")
    assert done.code == 0, done.err
    assert epochs_of(Path("run")) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("trainer", ["cpu", "cpu_ddp"])
def test_twenty_signals_at_any_time(start, unruly, trainer):
    """From the first import to the last epoch: none is lost, and nothing is left."""
    for number in range(20):
        folder = Path(f"run_{number}")
        started = start(
            *unruly, f"trainer={trainer}", "module.lag=0.05", f"run_dir={folder}",
            "trainer.max_epochs=1000", "data.workers=1",
        )  # fmt: skip
        time.sleep(0.4 + number * (0.5 if trainer == "cpu" else 0.9))
        done = started.send(signal.SIGTERM).done()
        assert done.code == 143, done.out
        assert "Traceback" not in done.out
        assert "stopped by SIGTERM" in done.out
        assert ("to go on: attnkit resume=" in done.out) == (folder / "config.yaml").is_file()
        assert start.left() == {}


@pytest.mark.slow
@linux
def test_second_signal_ends_what_does_not_answer(start, unruly):
    started = start(*unruly, "trainer=cpu_ddp", "module.how=hang", "run_dir=run")
    started.when(lambda: Path("run/metrics.csv").is_file() or Path("run/checkpoints").is_dir())
    time.sleep(2)
    started.send(signal.SIGTERM)
    time.sleep(2)
    assert started.process.poll() is None, "one signal is answered at the end of a step"
    done = started.send(signal.SIGTERM).done()
    assert done.code == 143, done.out
    assert start.left() == {}


def test_a_lost_signal_is_raised_again(tmp_path):
    """In a destructor Python raises nothing; imports run many."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from attnkit.launch.errors import guarded\n"
        "from attnkit.launch.processes.process import end_on_signals\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        sum(range(1000))\n"
        "def command():\n"
        "    Last()\n"
        "    print('still here', flush=True)\n"
        "    time.sleep(60)\n"
        "    return 0\n"
        "end_on_signals()\n"
        "sys.exit(guarded(command))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (143, "still here\n"), done.stderr
    assert done.stderr.strip() == "stopped by SIGTERM"


WORKERS = [
    (
        "kill",
        1,
        [
            ("attnkit: DataLoader worker (pid", "attnkit: a DataLoader worker has ended"),
            "  the system kills processes that take too much memory",
        ],
    ),
    ("raise", 1, ["attnkit: RuntimeError: fails on purpose", "  in mischief.py:"]),
    pytest.param(
        "user",
        2,
        ["attnkit: settings.txt: wrong on purpose", "  expected something right"],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("how", "code", "lines"), WORKERS)
def test_an_error_in_a_worker(attnkit, unruly, how, code, lines):
    done = attnkit(*unruly, "trainer=cpu", "data.workers=1", f"data.how={how}", "run_dir=run")
    assert done.code == code, done.err
    found = said(done)
    assert len(found) == 2, found
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


def test_an_error_of_the_system_names_the_file(attnkit, unruly):
    done = attnkit(*unruly, "trainer=cpu", "data.how=file", "run_dir=run")
    assert done.code == 1
    (line,) = said(done)
    assert line.startswith("attnkit: No such file or directory: /nowhere/to/be/found, in mischief")


@pytest.mark.slow
def test_a_signal_in_a_test_run(attnkit, start, unruly):
    assert attnkit(*unruly, "trainer=cpu", "trainer.max_epochs=1", "run_dir=run").code == 0
    started = start(
        *unruly[:2], "run=test", "ckpt=run", "module.stage=test", "module.how=hang",
        "module.rank=0", "run_dir=tested",
    )  # fmt: skip
    started.when(lambda: Path("tested/run.log").is_file())
    time.sleep(2)
    done = started.send(signal.SIGTERM).done()
    assert done.code == 143, done.out
    assert done.out.strip().splitlines()[-1] == "stopped by SIGTERM; to go on: start it again"


@pytest.mark.slow
def test_the_trials_after_a_signal_are_not_started(start, unruly):
    started = start(
        *unruly, "-m", "trainer=cpu", "module.lag=0.1,0.2", "trainer.max_epochs=1000",
        "run_dir=sweep",
    )  # fmt: skip
    started.when(lambda: list(Path("sweep").glob("0_*/checkpoints/last.ckpt")))
    done = started.send(signal.SIGTERM).done()
    assert done.code == 143, done.out
    assert "the trials after it were not started" in done.out
    assert len([path for path in Path("sweep").iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_stray_variables_change_nothing(attnkit, unruly, monkeypatch):
    """An interactive SLURM allocation, and what a launcher left behind; rank logs on request."""
    stray = {
        "SLURM_NTASKS": "4", "SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "interactive",
        "SLURM_PROCID": "0", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8",
    }  # fmt: skip
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    done = attnkit(
        *unruly, "trainer=cpu_ddp", "trainer.max_epochs=1", "rank_logs=true", "seeds=2",
        "run_dir=run",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert epochs_of(Path("run/seed_0")) == epochs_of(Path("run/seed_1")) == [1]
    assert "MEMBER: 2/2" in Path("run/run_rank1.log").read_text()
    assert "rank 1" not in Path("run/run.log").read_text()
    assert list(Path("run").glob("seed_*/run*.log")) == []


def test_other_nodes_need_a_launcher(attnkit, unruly):
    done = attnkit(*unruly, "trainer=cpu_ddp", "trainer.num_nodes=2", "run_dir=run")
    assert done.code == 2
    assert said(done)[0].startswith("attnkit: trainer.num_nodes: 2, but nothing has started")
    assert not Path("run").exists()


@pytest.mark.slow
def test_the_command_keeps_no_model_beside_those_of_its_ranks(attnkit, unruly, monkeypatch):
    """Nor data: a large data set would be in memory once more than there are ranks."""

    def alive():
        gc.collect()
        kinds = (LightningModule, LightningDataModule)
        return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), kinds)}

    before, beside = alive(), []
    started = ranks.start

    def start(*args):
        beside.extend(alive() - before)
        started(*args)

    monkeypatch.setattr(ranks, "start", start)
    done = attnkit(*unruly, "trainer=cpu_ddp", "trainer.max_epochs=1", "run_dir=run")
    assert done.code == 0, done.err
    assert beside == []
