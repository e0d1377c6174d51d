"""Tasks in a few threads of our own, for kernels that compute without Python's lock."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[int, ThreadPoolExecutor] = {}


def run_tasks(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks, in as many threads as torch may use; this thread is one of them.

    Each thread takes the next task when it has done one, so that one that another process keeps
    from its core delays no more than the task it has.
    """
    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    left = iter(tasks)

    def work() -> None:
        for task in left:
            task()

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


os.register_at_fork(after_in_child=_pools.clear)  # threads are not there in a forked process
