"""What the command line says before it has loaded anything."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def test_the_first_line_comes_before_the_configuration_is_read(hers):
    """And before Hydra is loaded: the file that is wrong is found after it."""
    command = [sys.executable, "-X", "importtime", "-m", "attnkit", "--config-dir", hers, "task=no"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("attnkit ")
    assert done.stdout.endswith(", starting\n")

    # it is written when it is said, into a pipe as well
    ours, theirs = os.pipe()
    began = time.monotonic()
    with subprocess.Popen(command[:1] + command[3:], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        first = os.read(ours, 100)
        said = time.monotonic() - began
        process.wait()
    whole = time.monotonic() - began
    os.close(ours)
    assert first.decode().strip().endswith("starting")
    assert said < whole / 2
    assert list(Path.cwd().iterdir()) == []


def test_the_help_loads_no_hydra():
    code = (
        "import sys\nfrom attnkit.launch.main import main\nassert main(['--help']) == 0\n"
        "print({'hydra', 'omegaconf', 'yaml', 'torch'} & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    assert "vit_tiny" in done.stdout


def test_garbage_is_collected_while_a_run_goes_on(attnkit, monkeypatch):
    """It is not while the command line is read, which then takes three quarters of the time."""
    collected = []
    with monkeypatch.context() as patched:
        patched.setattr("attnkit.launch.main._parser", lambda: collected.append(gc.isenabled()))
        assert attnkit("task=vit").code == 1  # there is no parser
    monkeypatch.setattr(
        "attnkit.launch.reproduce.command",
        lambda *_: collected.append(gc.isenabled()) or 0,
    )
    assert attnkit("run=reproduce").code == 0
    assert collected == [False, True]
    assert gc.isenabled()


def test_a_signal_is_acknowledged_at_once():
    """Whatever then takes its time to end."""
    code = (
        "import time\n"
        "from attnkit.launch.processes.process import end_on_signals\n"
        "from attnkit.lightning.errors import StoppedBySignal\n"
        "end_on_signals(acknowledge=True)\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "except StoppedBySignal:\n    input()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline() == "SIGINT: stopping\n"  # and it still waits
        assert process.poll() is None
        process.communicate("\n", timeout=60)


def test_nothing_of_the_working_directory_is_imported(tmp_path, monkeypatch):
    """`python -m` puts it first on the path, before attnkit can take it away."""
    monkeypatch.chdir(tmp_path)
    for name in ("ast", "token", "tokenize", "statistics", "queue", "random", "csv", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from here')")
    done = subprocess.run(
        [sys.executable, "-m", "attnkit", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
