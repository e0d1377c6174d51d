"""Decoded images that the trials of a sweep share: the first writes them, the others map them.

A sweep names a folder in the environment and removes it at its end; without one nothing is written.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from attnkit.lightning.files import SHARED_FOLDER, replacing
from attnkit.tasks.images.decode import Pictures, Pixels


def shared(decode: Callable[..., Pixels], paths: list[str], *args: Any, **options: Any) -> Pixels:
    """`decode(paths, *args, **options)`, or what another process or trial has found by it.

    The pixels are then mapped from the file: processes of a machine hold them once. A folder that
    cannot be written, or has no room, only costs time.

    Args:
        decode: gives the same for the same arguments and files.
        paths: the files.
        *args, **options: plain values; `title` is only said.
    """
    folder = os.environ.get(SHARED_FOLDER)
    if not folder:
        return decode(paths, *args, **options)
    named = {name: value for name, value in options.items() if name != "title"}
    file = Path(folder) / f"{key_of_files(paths, args, sorted(named.items()))}.pt"
    with _alone(file):
        with contextlib.suppress(Exception):  # absent or damaged
            found = torch.load(file, weights_only=True, mmap=True)
            whole = found.pop("pictures")
            return Pixels(**found, pictures=Pictures(*whole) if whole else None)
        pixels = decode(paths, *args, **options)
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


def key_of_files(paths: Sequence[str], *facts: Any) -> str:
    """A name for what is found in files; another one when a name, a size or a time changes."""
    key = hashlib.sha256(repr(facts).encode())
    for path in paths:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            key.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="replace"))
    return key.hexdigest()[:32]


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Others wait, rather than do the same."""
    lock = FileLock(file.with_suffix(".lock"))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no folder, or a file system without locks
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock)
        yield
