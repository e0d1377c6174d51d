"""Ctrl-C, SIGTERM and SIGUSR1 (pre-emption) wherever no fit defers them: a clean end.

Only a process of attnkit's own takes them over; in a script or a test they stay as they are.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attnkit.lightning.errors import StoppedBySignal
from attnkit.lightning.resume.stop_signals import STOPPING, Once, handle

_received: list[int] = []


def end_on_signals(*, acknowledge: bool = False) -> None:
    """From now on these signals raise `StoppedBySignal` in the main thread of this process.

    Args:
        acknowledge: say so at once: what is broken off may take seconds to end.
    """
    owner = os.getpid()
    once = Once()
    report = sys.unraisablehook

    def stop(signum: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker: who forked it ends it, and says so
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif once.is_new():
            _received.append(signum)
            if acknowledge:  # print is not for a signal handler
                os.write(2, f"\n{signal.Signals(signum).name}: stopping\n".encode())
            raise StoppedBySignal(signum)

    def again(lost: "sys.UnraisableHookArgs") -> None:
        # In a destructor or a weak reference's callback (imports are full of them) nothing can be
        # raised: a moment later, elsewhere.
        if isinstance(lost.exc_value, StoppedBySignal):
            once.forget()
            threading.Timer(0.05, os.kill, (owner, lost.exc_value.signum)).start()
        else:
            report(lost)

    sys.unraisablehook = again
    handle(stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def raise_received() -> None:
    """Raise a signal that was raised before, if any: some code swallows whatever it sees."""
    if _received:
        raise StoppedBySignal(_received[0])


def ignore_signals() -> None:
    """Only exiting is left, with the exit code that is known by now."""
    handle(signal.SIG_IGN)


@contextmanager
def held_back() -> Iterator[None]:
    """A process started here gets these signals once it calls `end_on_signals`, none before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
