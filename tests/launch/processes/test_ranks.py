"""Several processes: told of signals, none left behind, and one clear line when one goes wrong."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@linux
@pytest.mark.slow
def test_signal_in_training(attnkit, start, unruly):
    started = start(
        *unruly, "trainer=cpu_ddp", "module.lag=0.1", "trainer.max_epochs=5", "run_dir=run"
    )
    started.when(lambda: Path("run/metrics.csv").is_file() and len(epochs_of(Path("run"))) > 0)
    done = started.send(signal.SIGTERM).done()
    assert done.code == 143, done.out
    assert "stopped by SIGTERM after step " in done.out
    assert f"to go on: attnkit resume={Path('run').absolute()} --config-dir" in done.out
    assert "Traceback" not in done.out
    assert start.left() == {}
    assert epochs_of(Path("run")) != [1, 2, 3, 4, 5]
    done = attnkit(*unruly[:2], "resume=run")
    assert done.code == 0, done.err
    assert epochs_of(Path("run")) == [1, 2, 3, 4, 5]


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


def test_other_nodes_need_a_launcher(attnkit, unruly):
    done = attnkit(*unruly, "trainer=cpu_ddp", "trainer.num_nodes=2", "run_dir=run")
    assert done.code == 2
    assert said(done)[0].startswith("attnkit: trainer.num_nodes: 2, but nothing has started")
    assert not Path("run").exists()
