"""Files that are written completely or not at all, and attnkit's cache folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def cache_folder() -> Path:
    """Return the folder of attnkit's downloads and caches: `$XDG_CACHE_HOME/attnkit`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnkit"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a binary file to write and read, which replaces `path` if the block does not raise.

    Folders are made as needed. The last step is a rename, so that a reader, or a crash, finds the
    old file or the new one, never half of it. On most file systems of Linux the file has no name
    until it is complete and on the disk, so that an unfinished file leaves nothing behind, even
    after `kill -9`. A leftover of a kill between naming and renaming is removed the next time.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    beside = final.with_name(f".{final.name}.{os.getpid()}")
    _remove_leftovers(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        file = _without_name(final.parent)
        nameless = file is not None
        with file or open(beside, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if nameless:
                source = f"/proc/self/fd/{file.fileno()}"
                os.link(source, beside.name, dst_dir_fd=folder, follow_symlinks=True)
        os.replace(beside, final)
        with suppress(OSError):  # not every file system supports it
            os.fsync(folder)
    finally:
        os.close(folder)
        beside.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes that use this function, where folders can be locked;
    for reading a file and writing it again with an addition."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(final: Path) -> None:
    """Remove the temporary files beside `final` that processes which have ended left."""
    prefix = f".{final.name}."
    for name in os.listdir(final.parent):
        pid = name.removeprefix(prefix)
        if name.startswith(prefix) and pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                (final.parent / name).unlink(missing_ok=True)
            except OSError:
                pass  # a running process of another user


def _without_name(folder: Path) -> IO[bytes] | None:
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.fdopen(os.open(folder, flag | os.O_RDWR, 0o666), "w+b")
    except OSError:
        return None
