"""What every process of attnkit's own does first: ranks, trials and the command itself."""

import io
import os
import sys

SPINS = "2000"
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def command_of(module: str, *words: str) -> list[str]:
    """A command that ends with what `main` of this module returns, in this environment.

    It imports from where this process does. `python -m` would look into the working directory
    first, where a statistics.py or queue.py of the user's may lie, and its option `-P` is of
    Python 3.11.
    """
    begin = (
        f"import sys; sys.path[:] = {sys.path!a}\n"
        f"from {__name__} import print_anything; print_anything()\n"
        f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", begin, *words]


def print_anything() -> None:
    r"""From now on write characters that the output's encoding lacks as `\u2013`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def limit_spinning() -> None:
    """Set how long the threads of OpenMP spin before they sleep, unless the user has chosen.

    A thread that has done its share of a parallel region spins until the others have done theirs.
    GNU's libgomp, which torch uses on Linux, spins 300,000 times, about a millisecond: with another
    process on the cores it takes them from the thread that it waits for, at each of torch's many
    short regions. To sleep at once (`OMP_WAIT_POLICY=passive`) is better then, and on an idle
    machine up to 2.7 times as slow. A few thousand spins cost nothing there and little here;
    docs/benchmarks/busy.py has the figures.

    To be called before torch is loaded; processes that are started inherit it.
    """
    if not any(name in os.environ for name in _CHOSEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS
