"""Tables as people write them: a header, and a row on each line, each with its place."""

import csv
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from attnkit.lightning.errors import UserError
from attnkit.tasks.images.folder import SPLIT_OF


class Table:
    """A text file in UTF-8 with a header and a row per line.

    A row is one line: one whose quotes do not end in it is a problem of that line, and never takes
    the lines after it with it. Spaces around names in the header do not count.

    Args:
        path: the file.
        delimiter: what separates the columns; None: the one of comma, semicolon and tab that the
            header has most of.

    Raises:
        ValueError: a delimiter of more than one character.
        UserError: when it is read, if it is no such file.
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
        """What separates the columns."""
        return self._delimiter or max(",;\t", key=self._first[1].count)

    @cached_property
    def header(self) -> list[str]:
        """The names of the columns, as they are written."""
        return self.fields(*self._first)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Every line below the header as it is, after where it is."""
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
        """The fields of a line, [] of an empty one.

        Raises:
            UserError: its quotes do not end in it.
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
        """What is wrong with a row that has more or fewer columns than the header, or nothing."""
        if len(fields) == len(self.header):
            return ""
        advice = "a row is one line"  # this may be the rest of a value
        if len(fields) > len(self.header):
            advice = f"a value that holds {self.delimiter!r} belongs in quotes"
        return f"{where}: expected {len(self.header)} columns, got {len(fields)}; {advice}"

    def place(self, name: str) -> int:
        """Which column has this name, with the spaces around it or without.

        Raises:
            UserError: none has, or several have.
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
        """The column that is called by the first of these names, in small or capital letters."""
        there = [column.strip().lower() for column in self.header]
        return next((there.index(name) for name in names if name in there), None)


def split_in(given: str, where: str) -> str:
    """The split that a cell names by one of its usual spellings.

    Raises:
        UserError: it names none.
    """
    split = SPLIT_OF.get(given.strip().lower())
    if split is None:
        raise UserError(
            f"data: {where}: expected a split train, val or test, got {given.strip()!r}"
        )
    return split
