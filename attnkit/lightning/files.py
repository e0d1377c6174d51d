"""Paths from users, and texts and tables that are written completely or not at all."""

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.core.operators.files import replacing
from attnkit.lightning.errors import UserError

if TYPE_CHECKING:
    from lightning import Trainer

SHARED_FOLDER = "ATTNKIT_SHARED"
"""The environment variable with a folder in which a sweep's trials share decoded images."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_URL = re.compile(r"[A-Za-z][\w+.-]+::?//?|[\w+.-]+::", re.ASCII)  # also fsspec's zip::https://…


def absolute(path: str | Path) -> Path:
    """Return an absolute path without `~`, `.` and `..`; symbolic links stay as they are."""
    return Path(os.path.abspath(Path(path).expanduser()))


def in_log_folder(trainer: "Trainer", given: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the path given to a callback, or else `name` in the log folder, as on all ranks."""
    folder = trainer.log_dir or trainer.default_root_dir
    return Path(given or Path(folder) / name).absolute()


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    r"""Write a table completely or not at all; create folders as needed.

    A text that begins like a formula (`=`, `+`, `-`, `@`) gets an apostrophe before it, unless it
    is a number: spreadsheets run formulas, and names of files and classes come from anyone. What is
    not a character, as in the name of a file that is not UTF-8, is written `\udce9`.
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
    r"""Write a text in UTF-8, completely or not at all.

    What is not a character, as in the name of a file that is not UTF-8, is written `\udce9`, which
    YAML and JSON read back.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def refuse_url(path: Any, what: str, error: type[UserError] = UserError) -> None:
    """Raise an error for a URL: the file behind it could change between two reads."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if _URL.match(str(text)):
        raise error(f"{what}: {text} is a URL, expected a local path; download it first")
