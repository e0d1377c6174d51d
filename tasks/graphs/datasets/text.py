"""Reads rows of numbers and words from text files."""

import csv
import gzip
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import IO, Any
from zlib import error as ZlibError

import numpy as np

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.datasets.part import Form, Part, are_whole, numbers_of, refuse_stand_in

TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
_SHOWN = 40  # characters of a wrong line in a message
_TRUTHS = re.compile(r"\b(true|false)\b", re.IGNORECASE)
_INDEX = "the first column has no name, as an index, but"


class Text(Part):
    """A text file with one row per line and a comma, semicolon, tab or blanks between the fields.

    Empty lines and lines that start with # above the first row are left out. 3.0 is a whole number.
    """

    _numbers_of_lines: list[int] | None = None
    """The line of each row, after words were read; None: every line that is not empty is a row."""

    @cached_property
    def form(self) -> Form:  # type: ignore[override]
        first = next((line for line, _ in self._lines() if line.strip()), "")
        delimiter = next((mark for mark in (",", ";", "\t") if mark in first), None)
        index, *names = fields = _fields(first, delimiter) or [""]
        is_header = not any(map(_is_value, names))
        has_index = bool(names) and bool(re.fullmatch(r"(Unnamed: \d+)?", index))
        has_index &= is_header or names == _counted(len(names))
        is_header = has_index or (is_header and index != "" and not _is_value(index))
        # pandas writes no blanks between the fields of a header
        is_numbered = fields == _counted(len(fields)) and (delimiter is not None or not names)
        return Form(fields[has_index:], not has_index, is_header, has_index, is_numbered, delimiter)

    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        form = self.form
        lines = _Lines(self._rows(after_header=form.is_header))
        first = next(lines, None)
        if first is None:
            return np.empty((0, columns or 1), dtype)
        fields = _fields(first, form.delimiter)
        columns = columns or len(fields) - form.has_index
        is_whole = np.issubdtype(dtype, np.integer)
        kind = "whole number" if is_whole else "number"
        expected = f"a {kind}" if columns == 1 else f"{columns} {kind}s"
        if len(fields) != columns + form.has_index:
            raise self._wrong(lines, expected)
        if form.has_index and not _is_value(fields[0]):
            raise self.unordered(_INDEX)
        rest: Iterator[str] = chain([first], lines)
        if any(map(_is_truth, fields)):
            rest = (_TRUTHS.sub(lambda word: str(int(word[0].lower() == "true")), t) for t in rest)
        # float32 does not hold large numbers of an index exactly
        is_exact = form.has_index or (is_whole and any("." in field for field in fields))
        try:
            with warnings.catch_warnings():
                # NumPy 1 reads 1.5 as the integer 1, with a warning
                warnings.filterwarnings("error", ".*integer via a float", DeprecationWarning)
                found = np.loadtxt(
                    rest,
                    np.float64 if is_exact else dtype,
                    comments=None,
                    delimiter=form.delimiter,
                    quotechar='"',
                    ndmin=2,
                )
        except UserError:  # from reading the lines
            raise
        except (ValueError, OverflowError, DeprecationWarning) as error:
            raise self._wrong(lines, expected) from error
        self._numbers_of_lines = None
        if form.has_index:
            self.index = [(_INDEX, found[:, 0])]
            found = found[:, 1:]
        if is_whole and is_exact:
            wrong = np.argwhere(~are_whole(found))
            if len(wrong):
                where = self.place_of(int(wrong[0, 0]))
                raise UserError(f"{where}: expected {expected}, got {found[tuple(wrong[0])]}")
        return np.ascontiguousarray(found, dtype)

    def _words(self, count: int | None) -> np.ndarray:
        """Return the words; a line without a delimiter is one, unless it holds several numbers."""
        form, rows = self.form, list(self._lines())
        held = [row for row in rows if row[0].strip()]
        sizes = (count, count + 1) if count is not None else ()
        has_comments = bool(rows) and rows[0][1] > 1  # or a label like a comment
        if len(held) not in sizes and len(rows) in sizes and not has_comments:
            held = rows  # an empty line is a node, too
        empty = next((line for text, line in rows if not text.strip()), 0)
        is_last = not rows or rows[-1][1] <= empty
        if len(held) == count and len(rows) == count + 1 and empty and not is_last:
            raise UserError(
                f"{self.path}, line {empty}: is empty, which may be a row without a value below a "
                "header, or no row; write nan, or leave it out"
            )
        last = _fields(held[-1][0], form.delimiter) if held else []
        is_line = form.delimiter is None or (".txt" in self.path.name and not form.has_index)
        if is_line and not (len(last) > 1 and all(map(_is_value, last))):
            words = np.array([text.strip().strip('"') for text, _ in held], str)[:, None]
        else:
            split = [_fields(text, form.delimiter) for text, _ in held]
            for fields, (_, line) in zip(split, held, strict=True):
                if len(fields) != len(last):
                    raise UserError(
                        f"{self.path}, line {line}: expected {len(last)} fields, got {fields}; put "
                        "a word with a comma between quotes"
                    )
            words = np.array(split, str)
        has_header = form.has_index or len(words) - 1 == count
        if form.is_header and numbers_of(words[1:]).dtype.kind != "U":
            has_header = True
        if has_header and numbers_of(np.array(form.header)).dtype.kind == "U":
            self.form = form._replace(is_header=True)  # its names may begin like numbers
        words = words[has_header:]
        self._numbers_of_lines = [line for _, line in held[has_header:]]
        if form.has_index:
            self.index = [(_INDEX, numbers_of(words[:, 0]))]
            words = words[:, 1:]
        return words

    def fields(self) -> Iterator[tuple[list[str], str]]:
        delimiter, has_index = self.form.delimiter, self.form.has_index
        index = []
        for text, line in self._rows(after_header=has_index):
            fields = _fields(text, delimiter)
            index += fields[:has_index]
            yield fields[has_index:], f", line {line}"
        self.index = [(_INDEX, numbers_of(np.array(index)))] if index else []

    def place_of(self, row: int) -> str:
        row += self._skipped
        if self._numbers_of_lines is not None:
            return f"{self.where}, line {self._numbers_of_lines[row]}"
        rows = self._rows(after_header=self.form.is_header)
        return f"{self.where}, line {next(islice(rows, row, None))[1]}"

    def refuse_commented(self, names: Collection[str]) -> None:
        """Raise a `UserError` if a comment above the first row begins with a name of a node."""
        for text, line in self._every_line():
            text = text.strip()
            if text and text[0] != "#":
                return
            if text and (text in names or re.split(r"[,;\s]", text)[0] in names):
                raise self._comment_or_name(line)

    def _comment_or_name(self, line: int) -> UserError:
        return UserError(
            f"{self.path}, line {line}: begins with #, as a comment or a name: put comments above "
            "the first row, and such a name between quotes"
        )

    def _rows(self, *, after_header: bool) -> Iterator[tuple[str, int]]:
        """Return the lines that are not empty, with their numbers."""
        held = ((text, line) for text, line in self._lines() if text.strip())
        return islice(held, int(after_header), None)

    def _lines(self) -> Iterator[tuple[str, int]]:
        """Yield the lines with their numbers, without the comments above the first row.

        Raises:
            UserError: a later line begins like a comment.
        """
        has_begun = False
        for text, line in self._every_line():
            if text.lstrip()[:1] != "#":
                has_begun |= bool(text.strip())
                yield text, line
            elif has_begun:
                raise self._comment_or_name(line)

    def _every_line(self) -> Iterator[tuple[str, int]]:
        refuse_stand_in(self.path)
        opened: Callable[..., IO[str]] = gzip.open if self.path.suffix == ".gz" else open
        line = 0
        try:
            with opened(self.path, "rt", encoding="utf-8-sig", errors="backslashreplace") as file:
                for line, text in enumerate(file, 1):
                    yield text, line
        except EOFError as error:
            raise UserError(f"{self.path}: ends early, after line {line}") from error
        except (OSError, ZlibError) as error:
            raise UserError(f"{self.path}: cannot be read: {first_line(error)}") from error

    def _wrong(self, lines: "_Lines", expected: str) -> UserError:
        text = lines.text.strip()
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return UserError(f"{self.path}, line {lines.line}: expected {expected}, got {text!r}")


class _Lines:
    """Iterator over lines that keeps the last one, which is the wrong one if NumPy fails."""

    def __init__(self, texts: Iterator[tuple[str, int]]) -> None:
        self._texts = texts
        self.line, self.text = 0, ""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        self.text, self.line = next(self._texts)
        return self.text


def _fields(line: str, delimiter: str | None) -> list[str]:
    """Return the words between delimiters, without quotes."""
    if delimiter is None:
        return [field.strip('"') for field in line.split()]
    return [field.strip() for field in next(csv.reader([line.strip("\r\n")], delimiter=delimiter))]


def _is_value(word: str) -> bool:
    """Return whether a word begins like a number or is True or False, and thus no header."""
    return bool(re.match(r"[+-]?(\.?\d|(nan|inf)$)", word, re.IGNORECASE)) or _is_truth(word)


def _is_truth(word: str) -> bool:
    return bool(_TRUTHS.fullmatch(word))


def _counted(count: int) -> list[str]:
    return [str(number) for number in range(count)]
