"""A part of a graph in a file: its values, header and index, and the place of each row."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnkit.lightning.errors import UserError

_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; git lfs pull fetches it",
    b"<!doctype html": "a web page, not the file itself; download it again",
    b"<html": "a web page, not the file itself; download it again",
    b"<?xml": "an XML document, such as an error of a download, not the file itself",
}


def refuse_stand_in(path: Path) -> None:
    """Raise a `UserError` if a file is a Git LFS pointer or a page that was saved instead of it."""
    try:
        with path.open("rb") as file:
            start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for beginning, what in _BEGINNINGS.items():
        if start.startswith(beginning):
            raise UserError(f"{path}: is {what}")


class Form(NamedTuple):
    """Properties of a file that its first row shows.

    header: the names of the columns; for text the fields of the first row, which may be values.
    may_have_header: whether a first row of words may be a header.
    is_header: whether the first row of text holds words only.
    has_index: whether the first column of text has no name, as the index that pandas and R write.
    is_numbered: whether the first row is 0, 1, 2, …: values, or the header that pandas writes for
        columns without names.
    delimiter: the delimiter between fields of text; None: blanks.
    """

    header: Sequence[str] = ()
    may_have_header: bool = False
    is_header: bool = False
    has_index: bool = False
    is_numbered: bool = False
    delimiter: str | None = None


class Part(ABC):
    """Base class of `Text`, `Parquet` and `Array`, which read files for the other modules.

    Values are returned without a header and without the index that pandas and R write.

    Args:
        path: the file.
        where: its name in messages; by default the file.
        rows: the expected number of rows, if another file contains it.

    Attributes:
        item: what a row describes, in messages: a node or a graph.
        form: the form of the file, for text known at once, for Parquet after reading.
        index: the index of the data read last: for each of its columns the name in messages and the
            values.
        is_table: whether the file is read row by row.
    """

    is_table = True
    item = "node"
    form = Form()

    def __init__(self, path: Path, where: str = "", rows: int | None = None) -> None:
        self.path = path
        self.where = where or str(path)
        self.rows = rows
        self.index: list[tuple[str, np.ndarray]] = []
        self._skipped = 0

    @abstractmethod
    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        """Return all values; for a table numbers [rows, columns], True and False as 1 and 0.

        Args:
            dtype: the dtype of a table's numbers; an array has its own.
            columns: the expected number of columns of a table; None: that of the first row.

        Raises:
            UserError: a value is no such number, the number of columns is wrong, or the file ends
                early; the message names the line.
        """

    @abstractmethod
    def place_of(self, row: int) -> str:
        """Return the file and, for a table, the line or row, for messages."""

    def node_place(self, node: int) -> str:
        """Return where the row of a node is, for messages; for an array with the node's number."""
        return self.place_of(node) if self.is_table else f"{self.where}: {self.item} {node}"

    def words(self, count: int | None = None) -> np.ndarray:
        """Return the values as text, or as the numbers that Parquet and arrays hold.

        The shape is [rows], or [rows, columns] for several columns.

        Args:
            count: the number of nodes, if each has a row. With one row more, the first is a header.
                Given a count, an empty line may be a row, and an index must count the rows.
        """
        words = self._words(count)
        if self.is_table and len(words) == count:
            self.check_index()
        return words[:, 0] if words.ndim == 2 and words.shape[1] == 1 else words

    @abstractmethod
    def _words(self, count: int | None) -> np.ndarray: ...

    def fields(self) -> Iterator[tuple[list[str], str]]:
        """Yield the fields of each row as text, and its place in the file, such as ", line 7".

        A header of text is included unless there is an index.
        """
        raise NotImplementedError

    def check_rows(self, values: np.ndarray, what: str = "rows") -> None:
        """Raise a `UserError` if another file gives a different number of rows."""
        if self.rows not in (None, len(values)):
            raise UserError(f"{self.where}: expected {self.rows:,} {what}, got {len(values):,}")

    def check_index(self) -> None:
        """Raise a `UserError` unless the index, if there is one, counts the rows."""
        for what, index in self.index:
            if not counts_rows(index):
                raise self.unordered(what)

    def unordered(self, what: str) -> UserError:
        return UserError(
            f"{self.where}: {what} is not 0, 1, 2, …, the order of the nodes; sort the rows and "
            "leave it out, or make it a column with a name"
        )

    def refuse_other_index(self, others: Iterable["Part"]) -> None:
        """Raise a `UserError` if parts with a row for each row of this one have another index.

        No index and an index that counts the rows are the same.
        """
        here = self._order()
        for other in others:
            index = other._order()
            pairs = zip(here, index, strict=False)
            if len(here) != len(index) or not all(np.array_equal(a, b) for a, b in pairs):
                raise UserError(
                    f"{other.where}: its index is not that of {self.where}; put the rows of both "
                    "in one order, and leave the index out"
                )

    def _order(self) -> list[np.ndarray]:
        index = [values for _, values in self.index]
        return [] if len(index) == 1 and counts_rows(index[0]) else index

    def refuse_index(self, values: np.ndarray, what: str, names: Sequence[str] = ()) -> None:
        """Raise a `UserError` if the first of several columns may be an index with a name.

        Such a column counts the rows in any order, or holds the names of the nodes.

        Args:
            values: [rows, columns]; not checked if `rows` is known, since the form of the file is
                then known, too.
            what: the meaning of a column that is no index, for the message.
            names: names of the nodes.
        """
        if not self.is_table or self.rows is not None or values.ndim < 2 or values.shape[1] < 2:
            return
        first = values[:, 0]
        is_index = counts_rows(np.sort(first))
        numbers = numbers_of(np.array(names, str))
        if numbers.dtype.kind != "U":
            is_index |= np.array_equal(first, numbers.astype(first.dtype))
        if len(first) > 1 and is_index:
            raise UserError(
                f"{self.where}: the first column counts the rows or names the {self.item}s: it is "
                f"an index, or {what}; leave out an index, and put {what} behind another column"
            )

    def without_header(
        self,
        values: np.ndarray,
        beside: Iterable[tuple[int, bool]],
        what: str,
        *,
        is_header: bool = False,
    ) -> np.ndarray:
        """Return the values of a part that `is_numbered`, without the first row if it is a header.

        Args:
            beside: for each part with a row for each row of this one, its number of rows, and
                whether it is numbered, too.
            what: the meaning of a first row that is no header, for the message.
            is_header: whether the values themselves show that it is a header.

        Raises:
            UserError: the first row may be a header or values.
        """
        sizes = list(beside)
        if any(size == len(values) and not is_numbered for size, is_numbered in sizes):
            return values
        if is_header or any(size == len(values) - 1 for size, _ in sizes):
            return self.without_first(values)
        raise UserError(
            f"{self.where}: the first row, {what}, or a header of columns without names; write a "
            "header of words"
        )

    def without_first(self, values: np.ndarray) -> np.ndarray:
        """Return the values without their first row, which is a header."""
        self._skipped = 1
        return values[1:]


def numbers_of(words: np.ndarray) -> np.ndarray:
    """Return words as numbers, int64 if all are whole; the words themselves if one is no number.

    An empty word is NaN.
    """
    if words.dtype.kind != "U":
        return words
    try:
        found = np.where(words == "", "nan", words).astype(np.float64)
    except ValueError:
        return words
    fits = are_whole(found).all() and (not found.size or np.abs(found).max() < 2**63)
    return found.astype(np.int64) if fits else found


def are_whole(numbers: np.ndarray) -> np.ndarray:
    """Return which numbers are whole."""
    return np.isfinite(numbers) & (numbers == numbers.round())


def counts_rows(index: np.ndarray) -> bool:
    """Return whether an index counts the rows, from 0 as pandas does or from 1 as R does."""
    counted = np.arange(len(index))
    return index.dtype.kind in "iuf" and any(
        bool((index == (counted + start).astype(index.dtype)).all()) for start in (0, 1)
    )
