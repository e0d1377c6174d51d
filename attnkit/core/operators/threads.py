"""Tasks in a few threads of our own, for kernels that compute without Python's lock.

Inside of a task torch computes with one thread. A kernel that divides its work among torch's
threads waits for the last of them, and beside another busy process that one may not run for
milliseconds, at each of its many operations.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

Finish = Callable[[], None]
TASKS_PAY = 2**24  # products of a query's and a key's channel that take longer than starting tasks

_pools: dict[int, ThreadPoolExecutor] = {}


def run_tasks(tasks: Sequence[Callable[[], Finish | None]]) -> None:
    """Run the tasks, in as many threads as torch may use; this thread is one of them.

    Each thread takes the next task when it has done one, so that one that another process keeps
    from its core delays no more than the task it has. What a task returns is called in the order
    of the tasks, one at a time, so that sums do not depend on the threads.
    """
    if not tasks:
        return
    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    left = iter(enumerate(tasks))
    lock = Lock()
    finishes: dict[int, Finish | None] = {}
    finished = 0
    # a thread's own state: tensors made in it may be changed in it only
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        nonlocal finished
        with torch.inference_mode(inference), torch.no_grad(), one_thread_of_torch():
            for index, task in left:
                finish = task()
                with lock:
                    finishes[index] = finish
                    while finished in finishes:
                        finish = finishes.pop(finished)
                        finished += 1
                        if finish is not None:
                            finish()

    started = [_pool(helpers).submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        for helper in started:
            if not helper.cancel():  # it has begun
                helper.result()


def _pool(num_threads: int) -> ThreadPoolExecutor:
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPoolExecutor(num_threads, thread_name_prefix="attnkit")
    return _pools[num_threads]


@contextmanager
def one_thread_of_torch() -> Iterator[None]:
    """Within, torch computes with one thread, as seen from the thread that calls."""
    before = torch.get_num_threads()  # torch sets it itself, the first time that a thread asks
    set_openmp, set_mkl = _settings()
    set_openmp(1)
    of_mkl = set_mkl(1)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(of_mkl)


@cache
def _settings() -> tuple[Callable[[int], Any], Callable[[int], int]]:
    """OpenMP's setting of the calling thread, and MKL's: `torch.set_num_threads` changes all
    threads. Each does nothing where torch was built without the library."""
    found = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    library = None if found is None else ctypes.CDLL(str(found))
    names = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"
    openmp, mkl = (getattr(library, name, lambda number: 0) for name in names)
    return openmp, mkl


if hasattr(os, "register_at_fork"):  # threads are not there in a forked process
    os.register_at_fork(after_in_child=_pools.clear)
