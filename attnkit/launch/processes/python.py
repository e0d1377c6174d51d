"""Start of every process of attnkit: the command itself, ranks and trials."""

import io
import os
import sys

SPINS = "2000"
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def command_of(module: str, *words: str) -> list[str]:
    """Return a command that calls `main` of a module and ends with its result as exit code.

    It has the module path of this process. `python -m` would search the working directory first,
    where a statistics.py or queue.py of the user may lie, and its option `-P` needs Python 3.11.
    """
    begin = (
        f"import sys; sys.path[:] = {sys.path!a}\n"
        f"from {__name__} import print_anything; print_anything()\n"
        f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", begin, *words]


def print_anything() -> None:
    r"""Make output streams write characters that their encoding lacks as `\u2013`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def limit_spinning() -> None:
    """Set how long the threads of OpenMP spin before they sleep, unless the user has chosen.

    A thread that has finished its share of a parallel region spins until the others have finished.
    GNU's libgomp, which torch uses on Linux, spins 300,000 times, about a millisecond. If another
    process uses the cores, spinning takes them from the thread that it waits for, in each of
    torch's many short regions. Sleeping at once (`OMP_WAIT_POLICY=passive`) is better then, but up
    to 2.7 times as slow on an idle machine. A few thousand spins cost nothing on an idle machine
    and little on a busy one; docs/benchmarks/busy.py has the measurements.

    It must be called before torch is imported; child processes inherit the setting.
    """
    if not any(name in os.environ for name in _CHOSEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS
