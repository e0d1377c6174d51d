"""The command sets how OpenMP's threads wait; importing attnkit sets nothing."""

import os
import re
import subprocess
import sys

import pytest

from attnkit.launch.processes.process import SPINS

libgomp = pytest.mark.skipif(sys.platform != "linux", reason="torch uses GNU's libgomp on Linux")


def spins_of(command: list[str], **environment: str) -> list[str]:
    """What libgomp says of itself when a process of the command loads it."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    others = {k: v for k, v in os.environ.items() if k not in unset}
    environment = {**others, "OMP_DISPLAY_ENV": "VERBOSE", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)


@pytest.mark.slow
@libgomp
@pytest.mark.parametrize(
    ("given", "spins"), [({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_what_the_user_has_chosen_stays(given, spins):
    """Of the command's own start; torch is loaded after it."""
    code = "from attnkit.__main__ import main; main(); import torch"
    assert spins_of([sys.executable, "-c", code, "--version"], **given) == [spins]


@pytest.mark.slow
@libgomp
def test_a_run_and_its_ranks_spin_less(hers, tmp_path):
    command = [sys.executable, "-m", "attnkit", "--config-dir", str(hers), "task=mine"]
    command += ["trainer=cpu_ddp", "trainer.max_epochs=1", f"run_dir={tmp_path / 'run'}"]
    found = spins_of(command)
    assert len(found) >= 3
    assert set(found) == {SPINS}


@pytest.mark.slow
@libgomp
def test_the_library_sets_nothing():
    code = "import attnkit, torch; attnkit.attend(*torch.randn(3, 1, 1, 5, 7))"
    (found,) = spins_of([sys.executable, "-c", code])
    assert found == "300000"
