"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends without an error.

    It lies in the same folder, so that the last step is a rename and a reader (or a crash) sees the
    old file or the new one, never half of it. Folders are made as needed.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    beside = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, final)
    finally:
        beside.unlink(missing_ok=True)
