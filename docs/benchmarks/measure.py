"""Helpers of the benchmarks: alternating timing, medians of paired ratios, peak memory."""

import ctypes
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

os.environ.setdefault("ATTNKIT_LEDGER", "off")  # figures are those of the rules


@dataclass
class Times:
    """Seconds of each program in each round; the programs of a round ran one after the other."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, numerator: str, denominator: str) -> float:
        """The median over the rounds of one program's time divided by another's."""
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        return statistics.median(a / b for a, b in pairs)


def alternate(
    programs: dict[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 2,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Run the programs in turn, `rounds` times, each round beginning with another of them."""
    names = list(programs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for count in range(warm_up + rounds):
        for name in names[count % len(names) :] + names[: count % len(names)]:
            synchronize()
            start = clock()
            programs[name]()
            synchronize()
            if count >= warm_up:
                seconds[name].append(clock() - start)
    return Times(seconds)


def peak_memory(program: Callable[[], object]) -> int:
    """Bytes of memory the program takes at its peak beyond those held before (Linux).

    The kernel's own count of this process's resident memory, so that nothing is missed. A first
    run is not counted, since it also loads code.
    """
    program()
    begin_peak()
    before = resident("VmRSS")
    program()
    return resident("VmHWM") - before


def begin_peak() -> None:
    """Give freed memory back, and begin this process's peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else a program would reuse what another freed
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident(field: str) -> int:
    """Bytes of this process by the kernel's count: VmRSS, now; VmHWM, the peak; RssAnon, …"""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


def machine() -> str:
    """The machine and versions that a figure belongs to."""
    processor = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as cpuinfo:
        models = [line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")]
    if models:
        processor = models[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{memory:.0f} GB; Python {platform.python_version()}, torch {torch.__version__}"
    )


def table(rows: list[dict[str, str]]) -> str:
    """Rows as a Markdown table."""
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *([row[name] for name in header] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes in the block that each keep a core busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
