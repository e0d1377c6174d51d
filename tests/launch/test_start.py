"""What the command line says before it has loaded anything."""

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


def test_a_signal_is_acknowledged_at_once():
    """Whatever then takes its time to end."""
    code = (
        "import time\n"
        "from attnkit.launch.signals import end_on_signals\n"
        "from attnkit.lightning.errors import StoppedBySignal\n"
        "end_on_signals(acknowledge=True)\n"
        "print('ready', flush=True)\n"
        "try:\n    time.sleep(60)\n"
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
