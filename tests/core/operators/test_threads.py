"""Tasks in threads of our own, each computing with one thread of torch's."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from attnkit.core.operators.cpu import run_tasks


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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_tasks_in_a_forked_process(three_threads):
    """Threads are not there after a fork: the child starts its own."""

    def count():
        found = set()

        def task():
            found.add(threading.current_thread().name)
            time.sleep(0.02)

        run_tasks([task] * 12)
        return len(found)

    assert count() == 3
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # which ends a child that waits for threads it does not have
        os._exit(count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_task_that_fails_is_told():
    def fail():
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        run_tasks([lambda: None] * 5 + [fail] + [lambda: None] * 5)


def test_tasks_fill_tensors_of_inference(three_threads):
    # a test of Lightning's runs in inference mode, whose tensors no other thread could change
    both_work = threading.Barrier(2, timeout=30)
    with torch.inference_mode():
        made = torch.zeros(2)

        def task(place):
            both_work.wait()  # so that each has a thread of its own
            made[place] = 1

        run_tasks([lambda: task(0), lambda: task(1)])
    assert made.tolist() == [1, 1]
