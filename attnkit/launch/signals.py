"""Ctrl-C, SIGTERM and SIGUSR1 (pre-emption) wherever no fit defers them: a clean end.

Only a process of attnkit's own takes them over; in a script or a test they stay as they are.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attnkit.lightning.errors import StoppedBySignal

STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
# `timeout` and batch systems signal a process and its group, which makes two of one.
SAME_SIGNAL = 1.0
_received: list[int] = []


class Once:
    """Tells a second signal from the echo of the first."""

    def __init__(self) -> None:
        self._last = -SAME_SIGNAL

    def is_new(self) -> bool:
        """Whether this one, now, is no echo."""
        now = time.monotonic()
        fresh = now - self._last >= SAME_SIGNAL
        if fresh:
            self._last = now
        return fresh

    def forget(self) -> None:
        """The next one is no echo."""
        self._last = -SAME_SIGNAL


def end_on_signals() -> None:
    """From now on these signals raise `StoppedBySignal` in the main thread of this process."""
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
    for signum in STOPPING:
        signal.signal(signum, stop)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def raise_received() -> None:
    """Raise a signal that was raised before, if any: some code swallows whatever it sees."""
    if _received:
        raise StoppedBySignal(_received[0])


def ignore_signals() -> None:
    """What remains is to leave, with the exit code that is known by now."""
    for signum in STOPPING:
        signal.signal(signum, signal.SIG_IGN)


@contextmanager
def held_back() -> Iterator[None]:
    """A process started here gets these signals once it calls `end_on_signals`, none before."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
