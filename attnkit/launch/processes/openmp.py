"""How the threads of OpenMP wait for each other, on a machine that is not idle.

A thread that has done its share of a parallel region spins until the others have done theirs. GNU's
libgomp, which torch uses on Linux, spins 300,000 times before it sleeps, about a millisecond: with
another process on the cores it takes them from the thread that it waits for, at each of torch's
many short regions. To sleep at once (`OMP_WAIT_POLICY=passive`) is better then, and on an idle
machine up to 2.7 times as slow. A few thousand spins cost nothing there and little here;
docs/benchmarks/busy.py has the figures.
"""

import os

SPINS = "2000"
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set libgomp's number of spins, unless the user has chosen; before torch is loaded.

    Processes that are started inherit it.
    """
    if not any(name in os.environ for name in _CHOSEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS
