"""Rows of numbers and words in text files and Parquet, so many at a time."""

import csv
import gzip
import re
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import error as ZlibError

import numpy as np

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.files.stand_ins import refuse_stand_in

ROWS = 1_000_000  # that are in memory at a time
TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
TABLES = (*TEXT, ".parquet")
_SEEN = 40  # characters of a wrong line
_TRUTHS = re.compile(r"\b(true|false)\b", re.IGNORECASE)


class Form(NamedTuple):
    """What the first rows of a text file say of all.

    delimiter: what is between the fields; None: blanks.
    is_header: whether the first row holds words only.
    has_index: whether the first column has no name, as the index that pandas and R write.
    is_numbered: whether the first row is 0, 1, 2, …: the header that pandas writes of columns
        without names, or values. With blanks between them, as pandas writes none, it is values.
    first: the fields of the first row, without those of an index.
    """

    delimiter: str | None = None
    is_header: bool = False
    has_index: bool = False
    is_numbered: bool = False
    first: Sequence[str] = ()

    @classmethod
    def of(cls, path: Path) -> "Form":
        first = next((line for line, _ in _lines(path) if line.strip()), "")
        delimiter = next((mark for mark in (",", ";", "\t") if mark in first), None)
        index, *names = fields = _fields(first, delimiter) or [""]
        is_header = not any(map(_is_value, names))
        has_index = bool(names) and bool(re.fullmatch(r"(Unnamed: \d+)?", index))
        has_index &= is_header or names == _numbered(len(names))
        is_header = has_index or (is_header and index != "" and not _is_value(index))
        is_numbered = fields == _numbered(len(fields)) and (delimiter is not None or not names)
        return cls(delimiter, is_header, has_index, is_numbered, fields[has_index:])


def blocks(
    path: Path, dtype: Any, columns: int | None = None, *, in_order: bool = False
) -> Iterator[np.ndarray]:
    """The numbers [rows, columns] of a table, in blocks of rows.

    Text has one row per line, of numbers with a comma, semicolon, tab or blanks between them;
    empty lines, lines that start with # above the first row, a first line of words, and an index
    are left out. True and False are 1 and 0; 3.0 is a whole number.

    Args:
        columns: how many are expected; None: those of the first row.
        in_order: whether an index has to count the rows.

    Raises:
        UserError: what is not such a number, another number of columns, or a file that ends early,
            with the line.
    """
    if path.suffix == ".parquet":
        for names, parts in _parquet(path, in_order=in_order):
            yield _parquet_numbers(path, names, parts, dtype, columns)
        return
    form = Form.of(path)
    counted = _Counted(_rows(path, form))
    first = next(counted, None)
    if first is None:
        return
    fields = _fields(first, form.delimiter)
    columns = columns or len(fields) - form.has_index
    whole = np.issubdtype(dtype, np.integer)
    kind = "whole number" if whole else "number"
    expected = f"a {kind}" if columns == 1 else f"{columns} {kind}s"
    if len(fields) != columns + form.has_index:
        raise _wrong(path, counted, expected)
    if form.has_index and not _is_value(fields[0]):
        _check_index(path, np.array(fields[:1]), 0)
    rest: Iterator[str] = chain([first], counted)
    if any(map(_is_truth, fields)):
        rest = (_TRUTHS.sub(lambda word: str(int(word[0].lower() == "true")), t) for t in rest)
    read = np.float64 if whole and any("." in field for field in fields) else dtype
    before = 0
    while len(rows := _loaded(path, rest, read, form.delimiter, counted, expected)):
        if form.has_index:
            if in_order:
                _check_index(path, rows[:, 0], before)
            rows = rows[:, 1:]
        if read is not dtype:
            wrong = np.argwhere(~are_whole(rows))
            if len(wrong):
                where = f"{path}{line_of(path, before + int(wrong[0, 0]))}"
                raise UserError(f"{where}: expected {expected}, got {rows[tuple(wrong[0])]}")
        before += len(rows)
        yield rows.astype(dtype, copy=False)


def _loaded(
    path: Path,
    rest: Iterator[str],
    dtype: Any,
    delimiter: str | None,
    counted: "_Counted",
    expected: str,
) -> np.ndarray:
    """The next block of rows."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*input contained no data", UserWarning)
            # NumPy 1 reads 1.5 as 1, and says so
            warnings.filterwarnings("error", ".*integer via a float", DeprecationWarning)
            return np.loadtxt(
                rest,
                dtype,
                comments=None,
                delimiter=delimiter,
                quotechar='"',
                max_rows=ROWS,
                ndmin=2,
            )
    except UserError:  # of the lines that it was given
        raise
    except (ValueError, OverflowError, DeprecationWarning) as error:
        raise _wrong(path, counted, expected) from error


def table(
    path: Path,
    dtype: Any,
    columns: int | None = None,
    rows: int | None = None,
    *,
    in_order: bool = False,
) -> np.ndarray:
    """The whole of a table, [rows, columns].

    Args:
        rows: how many are expected, if it is known: no more than the result is in memory then.
        columns, in_order: see `blocks`.

    Raises:
        UserError: as `blocks`, and if there are more or fewer rows than expected.
    """
    found = blocks(path, dtype, columns, in_order=in_order)
    if rows is None:
        parts = list(found)
        return np.concatenate(parts) if parts else np.empty((0, columns or 1), dtype)
    whole, filled = np.empty((rows, columns or 0), dtype), 0
    for block in found:
        if not filled:
            whole = np.empty((rows, block.shape[1]), dtype)
        count = len(block)
        whole[filled : filled + count] = block[: max(rows - filled, 0)]
        filled += count
    if filled != rows:
        raise UserError(f"{path}: expected {rows:,} rows, got {filled:,}")
    return whole


def cells(path: Path, count: int | None = None) -> tuple[np.ndarray, list[int]]:
    """The words of a table without its header and index, and where they stand.

    A line without a delimiter is one word, unless it holds numbers with blanks between them.

    Args:
        count: how many rows there are if there is one for each node: of one more the first is a
            header, and an empty line is then a row.

    Returns:
        the words [rows], or of several columns [rows, columns]: text, or what the columns of
        Parquet hold; and the number of the line of each row of text.
    """
    if path.suffix == ".parquet":
        read = _parquet(path, words=True, count=count)
        parts = [np.stack(columns, axis=1) for _, columns in read]
        whole = np.concatenate(parts) if parts else np.empty((0, 1), str)
        return whole[:, 0] if whole.shape[1] == 1 else whole, []
    form, rows = Form.of(path), list(_lines(path))
    held = [row for row in rows if row[0].strip()]
    sizes = (count, count + 1) if count is not None else ()
    has_comments = bool(rows) and rows[0][1] > 1  # or a label that looks like one
    if len(held) not in sizes and len(rows) in sizes and not has_comments:
        held = rows  # an empty line is a node, too
    lines = [line for _, line in held]
    last = _fields(held[-1][0], form.delimiter) if held else []
    is_line = form.delimiter is None or (".txt" in path.name and not form.has_index)
    if is_line and not (len(last) > 1 and all(map(_is_value, last))):
        words = np.array([text.strip().strip('"') for text, _ in held], str)[:, None]
    else:
        split = [_fields(text, form.delimiter) for text, _ in held]
        for fields, line in zip(split, lines, strict=True):
            if len(fields) != len(last):
                raise UserError(
                    f"{path}, line {line}: expected {len(last)} fields, got {fields}; put a word "
                    "with a comma between quotes"
                )
        words = np.array(split, str)
    has_header = form.has_index or len(words) - 1 == count
    if form.is_header and numbers_of(words[1:]).dtype.kind != "U":
        has_header = True
    words, lines = words[has_header:], lines[has_header:]
    if form.has_index:
        if len(words) == count:
            _check_index(path, numbers_of(words[:, 0]), 0)
        words = words[:, 1:]
    return words[:, 0] if words.shape[1:] == (1,) else words, lines


def numbers_of(words: np.ndarray) -> np.ndarray:
    """The numbers that all the words are, int64 where they are whole; else the words."""
    if words.dtype.kind != "U":
        return words
    try:
        found = np.where(words == "", "nan", words).astype(np.float64)
    except ValueError:
        return words
    return found.astype(np.int64) if are_whole(found).all() else found


def are_whole(numbers: np.ndarray) -> np.ndarray:
    """Which of the numbers are whole."""
    return np.isfinite(numbers) & (numbers == numbers.round())


def named_rows(path: Path) -> Iterator[tuple[list[str], str]]:
    """The fields of each row of a table as text, and where it is, as `line_of`; of a text file a
    header too, unless it is that of an index."""
    if path.suffix == ".parquet":
        row = count()
        for _, columns in _parquet(path, words=True):
            for fields in zip(*(c.astype(str).tolist() for c in columns), strict=True):
                yield list(fields), f", row {next(row)}"
        return
    form = Form.of(path)
    for text, line in _rows(path, form if form.has_index else Form()):
        yield _fields(text, form.delimiter)[form.has_index :], f", line {line}"


def first_row(path: Path) -> Sequence[str]:
    """The names of the columns without an index; of text the first row, which may be no header."""
    if path.suffix == ".parquet":
        return next(_parquet(path), ((), ()))[0]
    return Form.of(path).first


def index_of(path: Path) -> list[np.ndarray]:
    """The index of a table, as pandas writes it; nothing of none or of one that counts the rows."""
    if path.suffix == ".parquet":
        read = [columns for _, columns in _parquet(path, of_index=True)]
        index = [np.concatenate(parts) for parts in zip(*read, strict=True)]
    else:
        form = Form.of(path)
        rows = _rows(path, form) if form.has_index else ()
        words = [_fields(text, form.delimiter)[0] for text, _ in rows]
        index = [numbers_of(np.array(words, str))] if words else []
    return [] if len(index) == 1 and _counts(index[0], 0) else index


def line_of(path: Path, row: int) -> str:
    """Where a row of a table is: ", line 7" of text, ", row 6" of others."""
    if path.suffix == ".parquet":
        return f", row {row}"
    return f", line {next(islice(_rows(path, Form.of(path)), row, None))[1]}"


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


def refuse_commented(path: Path, names: Container[str]) -> None:
    """UserError if a comment above the first row may be a row, as it begins with such a name."""
    for text, line in _every_line(path):
        text = text.strip()
        if text and text[0] != "#":
            return
        if text and (text in names or re.split(r"[,;\s]", text)[0] in names):
            raise _comment_or_name(path, line)


def _comment_or_name(path: Path, line: int) -> UserError:
    return UserError(
        f"{path}, line {line}: begins with #, as a comment or a name: put comments above the first "
        "row, and such a name between quotes"
    )


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """The lines but for comments, which are above the first row, with their numbers."""
    has_begun = False
    for text, line in _every_line(path):
        if text.lstrip()[:1] != "#":
            has_begun |= bool(text.strip())
            yield text, line
        elif has_begun:
            raise _comment_or_name(path, line)


def _every_line(path: Path) -> Iterator[tuple[str, int]]:
    refuse_stand_in(path)
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    line = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="backslashreplace") as file:
            for line, text in enumerate(file, 1):
                yield text, line
    except EOFError as error:
        raise UserError(f"{path}: ends early, after line {line}") from error
    except (OSError, ZlibError) as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error


def _rows(path: Path, form: Form) -> Iterator[tuple[str, int]]:
    """The lines that hold something, without a header."""
    held = ((text, line) for text, line in _lines(path) if text.strip())
    return islice(held, int(form.is_header), None)


def _wrong(path: Path, counted: _Counted, expected: str) -> UserError:
    text = counted.text.strip()
    text = text if len(text) <= _SEEN else f"{text[:_SEEN]}…"
    return UserError(f"{path}, line {counted.line}: expected {expected}, got {text!r}")


def _fields(line: str, delimiter: str | None) -> list[str]:
    """The words between delimiters, without quotes."""
    if delimiter is None:
        return [field.strip('"') for field in line.split()]
    return [field.strip() for field in next(csv.reader([line.strip("\r\n")], delimiter=delimiter))]


def _is_value(word: str) -> bool:
    """Whether a word begins like a number or is True or False, so that it is in no header."""
    return bool(re.match(r"[+-]?(\.?\d|(nan|inf)$)", word, re.IGNORECASE)) or _is_truth(word)


def _is_truth(word: str) -> bool:
    return bool(_TRUTHS.fullmatch(word))


def _numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _counts(index: np.ndarray, before: int) -> bool:
    """Whether an index counts the rows, from 0 as pandas does or from 1 as R does."""
    counted = np.arange(before, before + len(index))
    return index.dtype.kind in "iuf" and any(
        bool((index == (counted + start).astype(index.dtype)).all()) for start in (0, 1)
    )


def _check_index(
    path: Path,
    index: np.ndarray,
    before: int,
    what: str = "the first column has no name, as an index, but",
) -> None:
    """UserError unless an index counts the rows."""
    if not _counts(index, before):
        raise UserError(
            f"{path}: {what} is not 0, 1, 2, …, the order of the nodes; sort the rows and leave it "
            "out, or make it a column with a name"
        )


def _parquet(
    path: Path,
    *,
    words: bool = False,
    in_order: bool = False,
    count: int | None = None,
    of_index: bool = False,
) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """Names and columns of each block of rows, without pandas' index.

    Args:
        in_order: whether an index has to count the rows, as it also has to if they are `count`.
        words: columns of words are text, where nothing is ""; else they are objects.
        of_index: give those of the index alone.
    """
    refuse_stand_in(path)
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs pyarrow: pip install 'attnkit[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            schema = file.schema_arrow
            index = {name for name in schema.names if re.fullmatch(r"Unnamed: \d+|", name)}
            described = (schema.pandas_metadata or {}).get("index_columns", ())
            index |= {i for i in described if isinstance(i, str)}
            names = [name for name in schema.names if name not in index]
            num_rows = file.metadata.num_rows
            is_checked = in_order or num_rows == count
            checked = [*index] if is_checked or of_index else []
            for i in described if is_checked or of_index else ():
                if isinstance(i, dict) and i.get("kind") == "range":  # in the metadata alone
                    numbers = np.arange(i["start"], i["stop"], i["step"])
                    if len(numbers) != num_rows:  # pandas takes it for lost
                        continue
                    if of_index:
                        yield [], [numbers]
                        return
                    _check_index(path, numbers, 0, f"its index {i['start']}, …")
            names = [] if of_index else names
            before = 0
            for batch in file.iter_batches(ROWS, columns=[*names, *checked]):
                for name in checked:
                    values = batch.column(name).to_numpy(zero_copy_only=False)
                    if is_checked:
                        _check_index(path, values, before, f"its index {name!r}")
                before += batch.num_rows
                columns = [batch.column(name) for name in (checked if of_index else names)]
                parts = [column.to_numpy(zero_copy_only=False) for column in columns]
                if words:
                    parts = [_texts(part) if part.dtype.kind == "O" else part for part in parts]
                yield names, parts
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {first_line(error)}") from error


def _texts(objects: np.ndarray) -> np.ndarray:
    return np.array(["" if word is None else str(word) for word in objects], str)


def _parquet_numbers(
    path: Path, names: list[str], parts: list[np.ndarray], dtype: Any, columns: int | None
) -> np.ndarray:
    whole = np.issubdtype(dtype, np.integer)
    expected = "whole numbers" if whole else "numbers"
    if columns not in (None, len(names)):
        raise UserError(f"{path}: expected {columns} columns of {expected}, got {names}")
    for name, part in zip(names, parts, strict=True):
        if part.dtype.kind not in "iufb" or (whole and not are_whole(part).all()):
            raise UserError(f"{path}: column {name}: expected {expected}, got {part.dtype}")
    return np.stack([part.astype(dtype) for part in parts], axis=1)
