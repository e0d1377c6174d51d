"""Files that are written completely or not at all, and the folder of attnkit's own."""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attnkit.lightning.errors import UserError

if TYPE_CHECKING:
    from lightning import Trainer

SHARED_FOLDER = "ATTNKIT_SHARED"
"""In the environment, the folder in which a sweep's trials share decoded images while it runs."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_URL = re.compile(r"[A-Za-z][\w+.-]+::?//?|[\w+.-]+::", re.ASCII)  # also fsspec's zip::https://…


def absolute(path: str | Path) -> Path:
    """Without `~`, `.` and `..`; symbolic links stay as they are."""
    return Path(os.path.abspath(Path(path).expanduser()))


def in_log_folder(trainer: "Trainer", given: str | os.PathLike[str] | None, name: str) -> Path:
    """What a callback was told, or `name` in the log folder, which all ranks find together."""
    folder = trainer.log_dir or trainer.default_root_dir
    return Path(given or Path(folder) / name).absolute()


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    r"""A table, whole or not there; folders are made as needed.

    A text that begins as a formula does (`=`, `+`, `-`, `@`) gets an apostrophe before it, unless
    it is a number: spreadsheets run formulas, and names of files and classes come from anyone. What
    is no character, as in the name of a file that is not UTF-8, is written `\udce9`.
    """
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        writer = csv.writer(text)
        writer.writerow(map(_no_formula, header))
        writer.writerows(map(_no_formula, row) for row in rows)
        text.detach()


def _no_formula(cell: Any) -> Any:
    if isinstance(cell, str) and cell[:1] in _FORMULA:
        try:
            float(cell)
        except ValueError:
            return f"'{cell}"
    return cell


def write_text(path: Path, text: str) -> None:
    r"""A text in UTF-8, whole or not there.

    What is no character, as in the name of a file that is not UTF-8, is written `\udce9`, which
    YAML and JSON read back.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


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


def refuse_url(path: Any, what: str, error: type[UserError] = UserError) -> None:
    """An error for a URL: the file behind it could change between two reads."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if _URL.match(str(text)):
        raise error(f"{what}: {text} is a URL, expected a local path; download it first")


def cache_folder() -> Path:
    """Where attnkit keeps downloads and caches: `$XDG_CACHE_HOME/attnkit`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnkit"


def _without_name(folder: Path) -> IO[bytes] | None:
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.fdopen(os.open(folder, flag | os.O_RDWR, 0o666), "w+b")
    except OSError:
        return None
