"""Locks that no crash leaves behind: the kernel frees them with the process that held them."""

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
# Seconds of trying: a worker that was just forked has its parent's lock until it closes the file.
_FORKING = 0.2
_held: set[Path] = set()  # by this process


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the lock while the block runs; with `wait`, it always has.

    A process that has the lock may take it again. The file says which process has it, and stays:
    to remove it would let two have the lock. On a file system without locks a warning says so.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One object a path, which counts how often it was taken; it refuses to follow a link.
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
        except Timeout:  # else another process only looks, by `is_locked`
            if is_locked(path):
                raise


def is_locked(path: Path) -> bool:
    """Whether another process has the lock."""
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
    """Who has, or had, the lock."""
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"
