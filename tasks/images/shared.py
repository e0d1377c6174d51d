"""Cache of decoded image files, for the trials of a sweep and for later runs."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from attnkit.core.operators.files import cache_folder
from attnkit.lightning.files import SHARED_FOLDER, replacing
from attnkit.tasks.images.decode import (
    Pictures,
    Pixels,
    UndecodableImageError,
    decode_files,
    read_file,
)
from attnkit.tasks.images.sizes import Fit


def decoded(
    paths: list[str],
    fit: Fit,
    channels: int,
    *,
    keep: bool,
    title: str,
    least_area: float | None = None,
) -> Pixels:
    """Return the result of `decode_files`, from the cache if it is there.

    Pixels are cached only within a sweep, in a folder that the sweep names in the environment and
    removes at its end. They are memory-mapped, so that the processes of a machine hold them once.
    Results without pixels are cached in the user's cache folder, as the scan of a large folder
    takes minutes. Both are valid until a file's name, size or modification time differs, or a file
    becomes readable. If the folder cannot be written or is full, only time is lost.
    """
    folder = os.environ.get(SHARED_FOLDER) if keep else cache_folder() / "scans"
    what: dict[str, Any] = {"keep": keep, "least_area": least_area if keep else None}
    if not folder:
        return decode_files(paths, fit, channels, title=title, **what)
    file = Path(folder) / f"{key_of_files(paths, 4, fit, channels, what)}.pt"
    with _locked(file):
        with contextlib.suppress(Exception):  # absent or damaged
            found = torch.load(file, weights_only=True, mmap=True)
            whole = found.pop("pictures")
            if all(_fails(paths[number], fit) for number in found["failures"]):
                return Pixels(**found, pictures=Pictures(*whole) if whole else None)
        pixels = decode_files(paths, fit, channels, title=title, **what)
        with contextlib.suppress(OSError, RuntimeError):
            whole = pixels.pictures
            parts = (whole.shapes, whole.pixels) if whole else ()
            found = {**vars(pixels), "pictures": parts}
            tensors = [pixels.images, *parts]
            size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
            if shutil.disk_usage(file.parent).free > 2 * size:
                with replacing(file) as part:
                    torch.save(found, part)
    return pixels


def _fails(path: str, fit: Fit) -> bool:
    """Return True if a file still cannot be decoded: permissions may change without the file."""
    try:
        read_file(path, fit)
    except UndecodableImageError:
        return True
    return False


def key_of_files(paths: Sequence[str], *facts: Any) -> str:
    """Return a cache key of files, which changes with a name, size or modification time."""
    key = hashlib.sha256(repr(facts).encode())
    for path in paths:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            key.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="replace"))
    return key.hexdigest()[:32]


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file, so that other processes wait instead of doing the same work."""
    lock = FileLock(file.with_suffix(".lock"))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no folder, or a file system without locks
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock)
        yield
