"""How large the caches of this machine's processor are, as Linux tells it."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

CPU = Path("/sys/devices/system/cpu/cpu0")
SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}


class Caches(NamedTuple):
    """Bytes of a core's own share of the second level, and of the last level, which cores share."""

    core: int
    last: int


USUAL = Caches(core=2**19, last=2**25)  # where nothing is told: of a server's processor of 2021


@cache
def caches() -> Caches:
    """Those of the first processor, read once in a process; the usual ones elsewhere than on Linux
    and in containers that hide them."""
    return read_caches(CPU)


def read_caches(cpu: Path) -> Caches:
    """What the folder of a processor in Linux's /sys tells."""
    levels: dict[int, int] = {}
    core = USUAL.core
    try:
        threads = _count((cpu / "topology/thread_siblings_list").read_text())
        for folder in sorted(cpu.glob("cache/index*")):
            told = {
                name: (folder / name).read_text().strip()
                for name in ("level", "type", "size", "shared_cpu_list")
            }
            if told["type"] == "Instruction":
                continue
            size, level = int(told["size"][:-1]) * SIZES[told["size"][-1]], int(told["level"])
            levels[level] = size
            if level == 2:  # two threads of a core share it, and so may several cores
                core = size * threads // max(threads, _count(told["shared_cpu_list"]))
    except (OSError, ValueError, KeyError, IndexError):
        return USUAL
    last = levels[max(levels)] if levels else 0
    return Caches(core, last) if core and last > core else USUAL


def _count(numbers: str) -> int:
    """How many numbers a list such as 0-3,8 names."""
    ends = [part.split("-") for part in numbers.strip().split(",")]
    return sum(int(last) - int(first) + 1 for first, *_, last in ([*end, end[-1]] for end in ends))
