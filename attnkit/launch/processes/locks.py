"""File locks that the operating system frees when the process that holds them ends or crashes."""

import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from attnkit.lightning.errors import UserError

_MISSING = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
# Seconds of retrying, since a worker that was just forked holds its parent's lock until it closes
# the file.
_FORKING = 0.2
_held: set[Path] = set()  # locks of this process


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Try to hold a lock while the block runs; yield whether this process holds it.

    With `wait`, wait until it does. A process that holds the lock may take it again. The file names
    the process and is never removed, since removing it would let two processes hold the lock. On a
    file system without locks, warn and yield True.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # one object for each path, which counts how often it was taken and refuses to follow a link
    lock = FileLock(path, is_singleton=True, thread_local=False, mode=0o666)
    try:
        _acquire(lock, path, wait=wait)
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: a symbolic link; a lock must be a file of its own") from error
        if error.errno not in _MISSING:
            raise
        warnings.warn(
            f"{path.parent}: this file system has no locks; run one process at a time",
            stacklevel=3,
        )
        yield True
        return
    again = path in _held
    _held.add(path)
    try:
        if not again:
            with open(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "w") as file:
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield True
    finally:
        if not again:
            _held.discard(path)
        lock.release()


def _acquire(lock: FileLock, path: Path, *, wait: bool) -> None:
    while True:
        try:
            lock.acquire(timeout=-1 if wait else _FORKING, poll_interval=0.02)
            return
        except Timeout:  # if not locked, another process was only checking, in `is_locked`
            if is_locked(path):
                raise


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock."""
    if path in _held:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(path: Path) -> str:
    """Return the name of the process that holds, or last held, the lock."""
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"
