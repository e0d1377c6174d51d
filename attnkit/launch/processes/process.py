"""What every process of attnkit does at its start, and how it ends on a signal.

Only processes that run attnkit's command handle Ctrl-C, SIGTERM and SIGUSR1 (pre-emption), where no
fit defers them; scripts and tests keep their own handlers.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attnkit.lightning.errors import StoppedBySignal
from attnkit.lightning.resume.stop_signals import STOPPING, Once, handle

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


# --- signals --------------------------------------------------------------------------------------


_received: list[int] = []


def end_on_signals(*, acknowledge: bool = False) -> None:
    """Make these signals raise `StoppedBySignal` in the main thread of this process.

    Args:
        acknowledge: print the signal at once, since the interrupted work may take seconds to end.
    """
    owner = os.getpid()
    once = Once()
    report = sys.unraisablehook

    def stop(signum: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker: its parent ends it and reports the signal
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif once.is_new():
            _received.append(signum)
            if acknowledge:  # print is not safe in a signal handler
                os.write(2, f"\n{signal.Signals(signum).name}: stopping\n".encode())
            raise StoppedBySignal(signum)

    def again(lost: "sys.UnraisableHookArgs") -> None:
        # An exception in a destructor or in a weak reference's callback (imports are full of them)
        # is lost. Sending the signal again a moment later raises it elsewhere.
        if isinstance(lost.exc_value, StoppedBySignal):
            once.forget()
            threading.Timer(0.05, os.kill, (owner, lost.exc_value.signum)).start()
        else:
            report(lost)

    sys.unraisablehook = again
    handle(stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def raise_received() -> None:
    """Raise a received signal again, if there was one: some code swallows all exceptions."""
    if _received:
        raise StoppedBySignal(_received[0])


def ignore_signals() -> None:
    """Ignore these signals, since only exiting with a known exit code is left to do."""
    handle(signal.SIG_IGN)


@contextmanager
def held_back() -> Iterator[None]:
    """Block these signals for processes started in the block until they call `end_on_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
