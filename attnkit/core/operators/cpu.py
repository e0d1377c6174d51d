"""Operators and threads of our own on a CPU, when they may take the place of torch's, and the sizes
of the processor's caches.

Kernels that release Python's global lock are divided into a few long tasks, in each of which torch
computes with one thread. A kernel that divides each of its many operations among torch's threads
would wait each time for the last of them, which another busy process may keep from running for
milliseconds.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

Finish = Callable[[], None]
TASKS_PAY = 2**24  # products of channels of queries and keys; with fewer, starting tasks is slower
HALF = 2**31
PLAIN = {Tensor, nn.Parameter}
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

_pools: dict[int, ThreadPoolExecutor] = {}


def is_plain(*tensors: Tensor) -> bool:
    """Return whether all are plain tensors on a CPU, outside of tracing and torch.func; operators
    may then be replaced by faster ones with equal results."""
    return all(tensor.is_cpu and type(tensor) in PLAIN for tensor in tensors) and not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def has_tangent(tensors: Iterable[object]) -> bool:
    """Return whether one of the tensors takes part in forward-mode differentiation."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or any(
        isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def keep_mask(like: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Return the factors of dropout, shaped as `like`: 0 with probability p, else 1 / (1 − p).

    On a CPU each is drawn from 32 random bits, two from one draw of 64 bits, which is faster than
    torch's Bernoulli distribution; p is exact to 2⁻³².
    """
    if not like.is_cpu:
        return torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)
    count = like.numel()
    bits = torch.empty((count + 1) // 2, dtype=torch.int64)
    numbers = bits.random_(-(2**63), None, generator=generator).view(torch.int32)[:count]
    kept = torch.empty(like.shape, dtype=like.dtype)
    torch.lt(numbers, min(round((1 - p) * 2 * HALF) - HALF, HALF - 1), out=kept.view(-1))
    return kept.mul_(1 / (1 - p))


def dropout(x: Tensor, p: float) -> Tensor:
    """Apply dropout as `torch.nn.functional.dropout` in training, with the same distribution."""
    return x * keep_mask(x, p) if 0 < p < 1 and is_plain(x) else F.dropout(x, p)


def run_tasks(tasks: Sequence[Callable[[], Finish | None]]) -> None:
    """Run the tasks in as many threads as torch may use; the calling thread is one of them.

    Each thread takes the next task when it has finished one, so that a thread that loses its core
    to another process delays only its own task. The functions that tasks return are called in the
    order of the tasks, one at a time, so that sums do not depend on the threads.
    """
    if not tasks:
        return
    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    left = iter(enumerate(tasks))
    lock = Lock()
    finishes: dict[int, Finish | None] = {}
    finished = 0
    # inference mode is per thread, and inference tensors may be changed only inside it
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
    """Make torch compute with one thread in the block, in the calling thread only."""
    before = torch.get_num_threads()  # the first call in a thread also initializes its setting
    set_openmp, set_mkl = _settings()
    set_openmp(1)
    mkl_before = set_mkl(1)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(mkl_before)


@cache
def _settings() -> tuple[Callable[[int], Any], Callable[[int], int]]:
    """Return the functions that set the calling thread's number of threads in OpenMP and in MKL;
    `torch.set_num_threads` changes all threads. Each does nothing if torch lacks the library."""
    found = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    library = None if found is None else ctypes.CDLL(str(found))
    names = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"
    openmp, mkl = (getattr(library, name, lambda number: 0) for name in names)
    return openmp, mkl


if hasattr(os, "register_at_fork"):  # a forked process does not have the threads
    os.register_at_fork(after_in_child=_pools.clear)


class Caches(NamedTuple):
    """Bytes of a core's share of the second-level cache, and of the last level as a whole."""

    core: int
    last: int


USUAL = Caches(core=2**19, last=2**25)  # a server's processor of 2021, where sizes are unknown


@cache
def caches() -> Caches:
    """Return the caches of the first processor, read once in a process; `USUAL` on other systems
    than Linux and in containers that hide them."""
    return read_caches(Path("/sys/devices/system/cpu/cpu0"))


def read_caches(cpu: Path) -> Caches:
    """Read the sizes from the folder of a processor in Linux's /sys."""
    levels: dict[int, int] = {}
    core = USUAL.core
    try:
        threads = _count((cpu / "topology/thread_siblings_list").read_text())
        for folder in sorted(cpu.glob("cache/index*")):
            properties = {
                name: (folder / name).read_text().strip()
                for name in ("level", "type", "size", "shared_cpu_list")
            }
            if properties["type"] == "Instruction":
                continue
            size, level = properties["size"], int(properties["level"])
            levels[level] = num_bytes = int(size[:-1]) * UNITS[size[-1]]
            if level == 2:  # the threads of a core share it, and several cores may
                core = num_bytes * threads // max(threads, _count(properties["shared_cpu_list"]))
    except (OSError, ValueError, KeyError, IndexError):
        return USUAL
    last = levels[max(levels)] if levels else 0
    return Caches(core, last) if core and last > core else USUAL


def _count(numbers: str) -> int:
    """Count the numbers in a list such as 0-3,8."""
    ends = [part.split("-") for part in numbers.strip().split(",")]
    return sum(int(last) - int(first) + 1 for first, *_, last in ([*end, end[-1]] for end in ends))
