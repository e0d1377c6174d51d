"""The sizes of the processor's caches, read from Linux's /sys."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

CPU = Path("/sys/devices/system/cpu/cpu0")
SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}


class Caches(NamedTuple):
    """Bytes of a core's share of the second-level cache, and of the last level as a whole."""

    core: int
    last: int


USUAL = Caches(core=2**19, last=2**25)  # a server's processor of 2021, where sizes are unknown


@cache
def caches() -> Caches:
    """Return the caches of the first processor, read once in a process; `USUAL` on other systems
    than Linux and in containers that hide them."""
    return read_caches(CPU)


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
            levels[level] = num_bytes = int(size[:-1]) * SIZES[size[-1]]
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
