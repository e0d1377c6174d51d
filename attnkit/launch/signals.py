"""A clean end on Ctrl-C, SIGTERM and SIGUSR1 (pre-emption), where no fit defers these signals.

Only processes that run attnkit's command handle them; scripts and tests keep their own handlers.
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
