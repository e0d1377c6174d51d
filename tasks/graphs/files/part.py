"""A part of a graph in a file: its values, header and index, and the place of each row."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnkit.lightning.errors import UserError


class Form(NamedTuple):
    """What the first row of a file says of all.

    header: the names of the columns; of text the fields of the first row, which may be values.
    may_have_header: whether a first row of words may be a header.
    is_header: whether the first row of text holds words only.
    has_index: whether the first column of text has no name, as the index that pandas and R write.
    is_numbered: whether the first row is 0, 1, 2, …: the header that pandas writes of columns
        without names, or values.
    delimiter: what is between the fields of text; None: blanks.
    """

    header: Sequence[str] = ()
    may_have_header: bool = False
    is_header: bool = False
    has_index: bool = False
    is_numbered: bool = False
    delimiter: str | None = None


class Part(ABC):
    """The base of `Text`, `Parquet` and `Array`, which read what the other files interpret.

    Values come without a header and without the index that pandas and R write.

    Args:
        path: the file.
        where: what it is called in messages; the file, if not given.
        rows: how many it should have, if another file says so.

    Attributes:
        item: what a row is of, in messages: a node, or a graph.
        form: of text known at once, of Parquet after reading.
        index: of what was read last, for each column of the index what a message calls it, and its
            values.
        is_table: whether it is read by the row.
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
        """All of it; of a table numbers [rows, columns], True and False as 1 and 0.

        Args:
            dtype: of the numbers of a table; an array has its own.
            columns: of a table, how many are expected; None: those of the first row.

        Raises:
            UserError: a value that is no such number, another number of columns, or a file that
                ends early, with the line.
        """

    @abstractmethod
    def place_of(self, row: int) -> str:
        """The file and, of a table, the line or row, for a message."""

    def node_place(self, node: int) -> str:
        """Where the row of a node is, for a message; of an array with the node's number."""
        return self.place_of(node) if self.is_table else f"{self.where}: {self.item} {node}"

    def words(self, count: int | None = None) -> np.ndarray:
        """What stands in it, [rows] or of several columns [rows, columns]: text, or the numbers
        that Parquet and arrays hold.

        Args:
            count: how many rows there are if there is one for each node. Of one more the first is
                a header, an empty line is then a row, and an index has to count the rows.
        """
        words = self._words(count)
        if self.is_table and len(words) == count:
            self.check_index()
        return words[:, 0] if words.ndim == 2 and words.shape[1] == 1 else words

    @abstractmethod
    def _words(self, count: int | None) -> np.ndarray: ...

    def fields(self) -> Iterator[tuple[list[str], str]]:
        """The fields of each row as text, and its place within the file, such as ", line 7". Of
        text a header comes too, unless there is an index."""
        raise NotImplementedError

    def check_rows(self, values: np.ndarray, what: str = "rows") -> None:
        """UserError if another file says that there are more or fewer of them."""
        if self.rows not in (None, len(values)):
            raise UserError(f"{self.where}: expected {self.rows:,} {what}, got {len(values):,}")

    def check_index(self) -> None:
        """UserError unless the index, if there is one, counts the rows."""
        for what, index in self.index:
            if not counts_rows(index):
                raise self.unordered(what)

    def unordered(self, what: str) -> UserError:
        return UserError(
            f"{self.where}: {what} is not 0, 1, 2, …, the order of the nodes; sort the rows and "
            "leave it out, or make it a column with a name"
        )

    def refuse_other_index(self, others: Iterable["Part"]) -> None:
        """UserError if parts with a row for each row of this one have another index; none and one
        that counts the rows are the same."""
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
        """UserError if the first of several columns of a table counts the rows, in any order, as an
        index that was given a name, or has the names of the nodes.

        Args:
            values: [rows, columns]. Where `rows` is known, the form of the file is, too.
            what: a column is, if it is no index.
            names: of the nodes.
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
        """Values of a part that `is_numbered`, without their first row if that is a header.

        Args:
            beside: of parts with a row for each row of this one, how many rows they have, and
                whether they are numbered, too.
            what: the first row is, or is a header, in a message.
            is_header: whether the values themselves say that it is one.

        Raises:
            UserError: it may be either.
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
        """The values without their first row, which turned out to be a header."""
        self._skipped = 1
        return values[1:]


def numbers_of(words: np.ndarray) -> np.ndarray:
    """The numbers that all the words are, int64 where they are whole; else the words."""
    if words.dtype.kind != "U":
        return words
    try:
        found = np.where(words == "", "nan", words).astype(np.float64)
    except ValueError:
        return words
    fits = are_whole(found).all() and (not found.size or np.abs(found).max() < 2**63)
    return found.astype(np.int64) if fits else found


def are_whole(numbers: np.ndarray) -> np.ndarray:
    """Which of the numbers are whole."""
    return np.isfinite(numbers) & (numbers == numbers.round())


def counts_rows(index: np.ndarray) -> bool:
    """Return whether an index counts the rows, from 0 as pandas does or from 1 as R does."""
    counted = np.arange(len(index))
    return index.dtype.kind in "iuf" and any(
        bool((index == (counted + start).astype(index.dtype)).all()) for start in (0, 1)
    )
