"""Tasks in threads of our own, each computing with one thread of torch's."""

import random
import subprocess
import sys
import threading
import time

import pytest
import torch

from attnkit.core.operators.threads import run_tasks


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_torch_computes_with_one_thread_in_a_task(three_threads):
    """Also in a thread where an earlier task changed the number."""
    seen = {}

    def change():
        torch.set_num_threads(3)
        time.sleep(0.02)

    def task():
        seen.setdefault(threading.current_thread(), set()).add(torch.get_num_threads())
        time.sleep(0.02)

    run_tasks([change] * 12)
    run_tasks([task] * 12)
    assert len(seen) == 3
    assert set.union(*seen.values()) == {1}
    assert torch.get_num_threads() == 3


def test_what_tasks_return_is_called_in_their_order(three_threads):
    generator, order = random.Random(0), []
    waits = [generator.random() / 200 for _ in range(60)]

    def task(index):
        time.sleep(waits[index])
        return None if index % 7 == 0 else lambda: order.append(index)

    run_tasks([lambda index=index: task(index) for index in range(60)])
    assert order == [index for index in range(60) if index % 7]


def test_tasks_in_a_forked_process():
    """Threads are not there after a fork: the child starts its own."""
    script = (
        "import os, sys, threading, time, torch\n"
        "from attnkit.core.operators.threads import run_tasks\n"
        "torch.set_num_threads(2)\n"
        "def names():\n"
        "    found = set()\n"
        "    def task():\n"
        "        found.add(threading.current_thread().name)\n"
        "        time.sleep(0.05)\n"
        "    run_tasks([task] * 9)\n"
        "    return len(found)\n"
        "assert names() == 2\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if names() == 2 else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    command = sys.executable, "-c", script
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_task_that_fails_is_told():
    def fail():
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        run_tasks([lambda: None] * 5 + [fail] + [lambda: None] * 5)
