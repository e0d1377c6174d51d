"""Locks that no crash leaves behind: the kernel frees them with the process that held them.

`flock` of a file. On a file system without it (some network ones), and on Windows, nothing is
locked, and a warning says so.
"""

import errno
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MISSING = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_GLANCES = 10  # tries, since `is_locked` in another process has the lock for a moment
_GLANCE = 0.02  # seconds


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the lock while the block runs; `wait`: it has, sooner or later.

    The file says which process that is, and stays: to remove it would let two have the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        mine = _take(file, path, wait)
        if mine:
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        try:
            yield mine
        finally:
            if mine and fcntl:  # by name: a forked worker that lives on has the file open too
                _unlock(file)
    finally:
        os.close(file)


def is_locked(path: Path) -> bool:
    """Whether a process has the lock."""
    if fcntl is None:
        return False
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        _unlock(file)
        return False
    finally:
        os.close(file)


def holder(path: Path) -> str:
    """Who has, or had, the lock."""
    try:
        return path.read_text().strip() or "another process"
    except OSError:
        return "another process"


def _take(file: int, path: Path, wait: bool) -> bool:
    if fcntl is None:
        return True
    for attempt in range(_GLANCES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            if attempt + 1 < _GLANCES:
                time.sleep(_GLANCE)
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            warnings.warn(
                f"{path.parent}: this file system has no locks; one process at a time, please",
                stacklevel=3,
            )
            return True
    return False


def _unlock(file: int) -> None:
    with suppress(OSError):  # there are none on this file system
        fcntl.flock(file, fcntl.LOCK_UN)
