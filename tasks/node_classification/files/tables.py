"""Rows of numbers and words in text files and Parquet, so many at a time."""

import gzip
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any
from zlib import error as ZlibError

import numpy as np

from attnkit.lightning.errors import UserError, first_line

ROWS = 1_000_000  # that are in memory at a time
TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
TABLES = (*TEXT, ".parquet")
_SEEN = 40  # characters of a wrong line


def blocks(path: Path, dtype: Any, columns: int | None = None) -> Iterator[np.ndarray]:
    """The numbers [rows, columns] of a table, in blocks of rows.

    Text has one row per line, of numbers with a comma, semicolon, tab or blanks between them;
    empty lines, lines that start with #, and a first line of words are left out.

    Args:
        columns: how many are expected; None: those of the first row.

    Raises:
        UserError: what is not such a number, another number of columns, or a file that ends early,
            with the line.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path, dtype, columns)
        return
    counted = _Counted(_texts(path))
    kind = "whole number" if np.issubdtype(dtype, np.integer) else "number"
    with _read(path, counted):
        first = next(counted, None)
        if first is None:
            return
        columns = columns or len(_fields(first))
        expected = f"a {kind}" if columns == 1 else f"{columns} {kind}s"
        if len(_fields(first)) != columns:
            raise _wrong(path, counted, expected)
        rest, delimiter = chain([first], counted), _delimiter(first)
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*input contained no data", UserWarning)
                    # NumPy 1 reads 1.5 as 1, and says so
                    warnings.filterwarnings("error", ".*integer via a float", DeprecationWarning)
                    rows = np.loadtxt(
                        rest,
                        dtype,
                        comments=None,
                        delimiter=delimiter,
                        quotechar='"',
                        max_rows=ROWS,
                        ndmin=2,
                    )
            except (ValueError, OverflowError, DeprecationWarning) as error:
                raise _wrong(path, counted, expected) from error
            if not rows.size:
                return
            yield rows


def table(
    path: Path, dtype: Any, columns: int | None = None, rows: int | None = None
) -> np.ndarray:
    """The whole of a table, [rows, columns].

    Args:
        rows: how many are expected, if it is known: no more than the result is in memory then.

    Raises:
        UserError: as `blocks`, and if there are more or fewer rows than expected.
    """
    if rows is None:
        parts = list(blocks(path, dtype, columns))
        return np.concatenate(parts) if parts else np.empty((0, columns or 1), dtype)
    whole, filled = np.empty((rows, columns or 0), dtype), 0
    for block in blocks(path, dtype, columns):
        if not filled:
            whole = np.empty((rows, block.shape[1]), dtype)
        count = len(block)
        whole[filled : filled + count] = block[: max(rows - filled, 0)]
        filled += count
    if filled != rows:
        raise UserError(f"{path}: expected {rows:,} rows, got {filled:,}")
    return whole


def words(path: Path) -> Iterator[tuple[list[str], int]]:
    """The fields of each row of a text file, with the number of its line; a header too."""
    for text, line in lines(path):
        yield _fields(text), line


def lines(path: Path) -> Iterator[tuple[str, int]]:
    """The lines of a text file that hold something, as one word each, with their numbers."""
    counted = _Counted(_texts(path, header=True))
    with _read(path, counted):
        for text in counted:
            yield text.strip().strip('"'), counted.line


def line_of(path: Path, row: int) -> str:
    """Where a row of a table is: ", line 7" of text, ", row 6" of others."""
    if path.suffix == ".parquet":
        return f", row {row}"
    for number, (_, line) in enumerate(_texts(path)):
        if number == row:
            return f", line {line}"
    raise IndexError(row)


class _Counted:
    """Lines, of which the last one given is known."""

    def __init__(self, texts: Iterator[tuple[str, int]]) -> None:
        self._texts = texts
        self.line, self.text = 0, ""

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> str:
        self.text, self.line = next(self._texts)
        return self.text


def _texts(path: Path, *, header: bool = False) -> Iterator[tuple[str, int]]:
    """The lines that hold something, with their numbers; a first one of words unless asked for."""
    with _open(path) as file:
        lines = ((line, number) for number, line in enumerate(file, 1))
        held = (
            (line, number) for line, number in lines if line.strip() and line.lstrip()[0] != "#"
        )
        first = next(held, None)
        if first is None:
            return
        is_header = not any(map(_is_number, _fields(first[0])))
        yield from held if is_header and not header else chain([first], held)


def _open(path: Path) -> IO[str]:
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", errors="backslashreplace")


@contextmanager
def _read(path: Path, counted: _Counted) -> Iterator[None]:
    """What goes wrong in reading a text file is said with the place."""
    try:
        yield
    except EOFError as error:
        raise UserError(f"{path}: ends early, after line {counted.line}") from error
    except (OSError, ZlibError) as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error


def _wrong(path: Path, counted: _Counted, expected: str) -> UserError:
    text = counted.text.strip()
    text = text if len(text) <= _SEEN else f"{text[:_SEEN]}…"
    return UserError(f"{path}, line {counted.line}: expected {expected}, got {text!r}")


def _delimiter(line: str) -> str | None:
    """What is between the fields of a line; None: blanks."""
    return next((mark for mark in (",", ";", "\t") if mark in line), None)


def _fields(line: str) -> list[str]:
    return [field.strip().strip('"') for field in line.strip().split(_delimiter(line))]


def _is_number(word: str) -> bool:
    return bool(re.match(r"[+-]?(\.?\d|nan|inf)", word, re.IGNORECASE))


def _parquet(path: Path, dtype: Any, columns: int | None) -> Iterator[np.ndarray]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs pyarrow: pip install 'attnkit[parquet]'") from error
    whole = np.issubdtype(dtype, np.integer)
    expected = "whole numbers" if whole else "numbers"
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if columns not in (None, len(names)):
                raise UserError(f"{path}: expected {columns} columns of {expected}, got {names}")
            for batch in file.iter_batches(ROWS):
                parts = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
                for name, part in zip(names, parts, strict=True):
                    if part.dtype.kind not in ("iu" if whole else "iuf"):
                        raise UserError(
                            f"{path}: column {name}: expected {expected}, got {part.dtype}"
                        )
                yield np.stack([part.astype(dtype) for part in parts], axis=1)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error
