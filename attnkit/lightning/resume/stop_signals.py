"""The signals that stop a run, and their handlers. It needs no torch."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# `timeout` and batch systems signal a process and its group: one signal arrives twice.
ECHO = 1.0  # seconds


class Once:
    """Distinguishes a second signal from the echo of the first."""

    def __init__(self) -> None:
        self._last = -ECHO

    def is_new(self) -> bool:
        """Whether a signal that comes now is not an echo."""
        now = time.monotonic()
        if now - self._last < ECHO:
            return False
        self._last = now
        return True

    def forget(self) -> None:
        """Treat the next signal as new."""
        self._last = -ECHO


def handle(handler: Callable[..., None] | signal.Handlers) -> dict[int, Any]:
    """Install a handler of the signals, in the main thread only; return the handlers before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.signal(signum, handler) for signum in STOPPING}


def put_back(handlers: Mapping[int, Any]) -> None:
    """Restore handlers from `handle`; None, a handler outside of Python, becomes the default."""
    for signum, handler in handlers.items():
        signal.signal(signum, handler or signal.SIG_DFL)
