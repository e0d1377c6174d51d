"""Ctrl-C, SIGTERM and SIGUSR1 (pre-emption) wherever no fit defers them: a clean end.

Only a process of attnkit's own takes them over; in a script or a test they stay as they are.
"""

import os
import signal
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


class Once:
    """Tells a second signal from the echo of the first."""

    def __init__(self) -> None:
        self._last = -SAME_SIGNAL

    def __bool__(self) -> bool:
        now = time.monotonic()
        fresh = now - self._last >= SAME_SIGNAL
        if fresh:
            self._last = now
        return fresh


def end_on_signals() -> None:
    """From now on these signals raise `StoppedBySignal` in the main thread of this process."""
    owner = os.getpid()
    fresh = Once()

    def stop(signum: int, _: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker: who forked it ends it, and says so
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif fresh:
            raise StoppedBySignal(signum)

    for signum in STOPPING:
        signal.signal(signum, stop)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


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
