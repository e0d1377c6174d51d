"""Files that are written completely or not at all, and the folder of attnkit's own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def cache_folder() -> Path:
    """Where attnkit keeps downloads and caches: `$XDG_CACHE_HOME/attnkit`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnkit"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file to write and read, which becomes `path` when the block ends without an error.

    Folders are made as needed. The last step is a rename: a reader (or a crash) sees the old file
    or the new one, never half of it. Where the file system can (most of Linux's), the file has no
    name until it is whole and on the disk: nothing remains of one that was not finished, not even
    after `kill -9`. What a kill between naming and renaming left is removed the next time.
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
        with suppress(OSError):  # not every file system knows how to
            os.fsync(folder)
    finally:
        os.close(folder)
        beside.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """In the block no other process is in such a block of this folder, where folders can be locked:
    to read a file, and write it anew with something added."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(final: Path) -> None:
    """Remove files beside `final` of processes that have ended."""
    prefix = f".{final.name}."
    for name in os.listdir(final.parent):
        pid = name.removeprefix(prefix)
        if name.startswith(prefix) and pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                (final.parent / name).unlink(missing_ok=True)
            except OSError:
                pass  # somebody else's, and alive


def _without_name(folder: Path) -> IO[bytes] | None:
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.fdopen(os.open(folder, flag | os.O_RDWR, 0o666), "w+b")
    except OSError:
        return None
