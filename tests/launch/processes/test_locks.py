"""Locks on files: one process at a time, freed with it."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from attnkit.launch.processes.locks import holder, is_locked, locked
from attnkit.lightning import UserError

HOLD = """
import os, sys, time
from pathlib import Path
from attnkit.launch.processes.locks import locked
with locked(Path(sys.argv[1])) as mine:
    worker = os.fork() if "fork" in sys.argv else None  # it has the file open, too
    if worker == 0:
        time.sleep(600)
    print(worker or mine, flush=True)
    if "release" not in sys.argv:
        time.sleep(600)
print("released", flush=True)
time.sleep(600)
"""


@contextmanager
def holding(path, *options):
    """Another process that holds a lock, and the first line it prints."""
    command = [sys.executable, "-c", HOLD, str(path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "a.lock"


def test_a_second_process_is_refused_and_told_who(path):
    with holding(path) as (other, said):
        assert said == "True"
        assert is_locked(path)
        with locked(path) as mine:
            assert not mine
        assert holder(path) == f"process {other.pid} on {os.uname().nodename}"


def test_the_lock_of_a_killed_process_is_free(path):
    with holding(path) as (other, _):
        other.kill()
        other.wait()
        assert not is_locked(path)
        with locked(path) as mine:
            assert mine
            assert holder(path).startswith(f"process {os.getpid()} ")


@pytest.mark.parametrize("how", ["release", "kill"])
def test_a_worker_that_outlives_its_process_does_not_keep_it(path, how):
    with holding(path, "fork", how) as (other, worker):
        try:
            if how == "kill":
                other.kill()
                other.wait()
            else:
                assert other.stdout.readline() == "released\n"
            os.kill(int(worker), 0)
            with locked(path) as mine:
                assert mine
        finally:
            os.kill(int(worker), signal.SIGKILL)


def test_a_process_that_has_it_may_take_it_again(path):
    with locked(path) as first, locked(path) as second:
        assert first
        assert second
    with holding(path) as (_, said):
        assert said == "True"


def test_who_waits_gets_it(path):
    with holding(path) as (other, _):
        os.kill(other.pid, signal.SIGTERM)
        with locked(path, wait=True) as mine:
            assert mine


def test_no_lock_follows_a_link(path, tmp_path):
    precious = tmp_path / "thesis.tex"
    precious.write_text("years of work")
    path.parent.mkdir()
    path.symlink_to(precious)
    with pytest.raises(UserError, match=r"a\.lock: a symbolic link"), locked(path):
        pass
    assert precious.read_text() == "years of work"
