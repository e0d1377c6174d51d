"""Read CSV tables with a header and a row per line, with the place of each row."""

import csv
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from attnkit.lightning.errors import UserError
from attnkit.tasks.images.folder import SPLIT_OF


class Table:
    """A text file in UTF-8 with a header and a row per line.

    A row is one line: quotes that do not end in their line are a problem of that line, and the next
    line is read as usual. Spaces around names in the header do not count.

    Args:
        path: the file.
        delimiter: character between columns; None: comma, semicolon or tab, whichever is most
            frequent in the header.

    Raises:
        ValueError: the delimiter has more than one character.
        UserError: on reading, if the file is not a CSV file in UTF-8.
    """

    def __init__(self, path: Path, delimiter: str | None = None) -> None:
        if delimiter is not None and len(delimiter) != 1:
            raise ValueError(f"delimiter: expected one character, got {delimiter!r}")
        self.path = path
        self._delimiter = delimiter

    @cached_property
    def _first(self) -> tuple[str, str]:
        return next(self._lines(), (f"{self.path}, line 1", ""))

    @property
    def delimiter(self) -> str:
        """The character between columns."""
        return self._delimiter or max(",;\t", key=self._first[1].count)

    @cached_property
    def header(self) -> list[str]:
        """The names of the columns, as written in the file."""
        return self.fields(*self._first)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Return pairs of the place and the text of every line below the header."""
        lines = self._lines()
        next(lines, None)
        return lines

    def _lines(self) -> Iterator[tuple[str, str]]:
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                for number, line in enumerate(file, 1):
                    yield f"{self.path}, line {number}", line
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data: {self.path} is not a CSV file in UTF-8: {error}") from error

    def fields(self, where: str, line: str) -> list[str]:
        """Return the fields of a line, [] for an empty line.

        Raises:
            UserError: a quote does not end in the line.
        """
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(
                    f"data: {where}: a quote opens that does not close in this line; a row is one "
                    'line, and a " in a quoted value is written ""'
                ) from error
        try:  # text after a closing quote belongs to the field
            return next(csv.reader([line], delimiter=self.delimiter), [])
        except csv.Error as error:
            raise UserError(f"data: {where}: {error}") from error

    def wrong_count(self, where: str, fields: Sequence[str]) -> str:
        """Return the problem of a row with more or fewer columns than the header, or ""."""
        if len(fields) == len(self.header):
            return ""
        advice = "a row is one line"  # the line may be the rest of a quoted value
        if len(fields) > len(self.header):
            advice = f"a value that holds {self.delimiter!r} belongs in quotes"
        return f"{where}: expected {len(self.header)} columns, got {len(fields)}; {advice}"

    def place(self, name: str) -> int:
        """Return the index of the column with this name, with or without spaces around it.

        Raises:
            UserError: no column has the name, or several have.
        """
        stripped = [column.strip() for column in self.header]
        for names, wanted in ((self.header, name), (stripped, name.strip())):
            if names.count(wanted) == 1:
                return names.index(wanted)
        problem = "several columns" if stripped.count(name.strip()) > 1 else "no column"
        raise UserError(
            f"data: {self.path} has {problem} {name!r}, "
            f"only {', '.join(stripped) or 'an empty header'}"
        )

    def guessed(self, names: Sequence[str]) -> int | None:
        """Return the index of the column with the first of these names, in any case, or None."""
        there = [column.strip().lower() for column in self.header]
        return next((there.index(name) for name in names if name in there), None)


def split_in(given: str, where: str) -> str:
    """Return the split that a cell names in one of the usual spellings.

    Raises:
        UserError: the cell names no split.
    """
    split = SPLIT_OF.get(given.strip().lower())
    if split is None:
        raise UserError(
            f"data: {where}: expected a split train, val or test, got {given.strip()!r}"
        )
    return split
