"""The parts of a graph by name: files of a folder, or arrays of one .npz."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.files.stand_ins import refuse_stand_in
from attnkit.tasks.graphs.files.tables import (
    TABLES,
    TEXT,
    Form,
    cells,
    line_of,
    numbers_of,
    table,
)

ARRAYS = (".npy", ".npz")


class Parts:
    """A folder with a file for each part, `<name>.npy`, `.npz` with one array, `.csv`, `.tsv`,
    `.txt`, each also `.gz`, or `.parquet`; or an .npz with an array for each.

    Args:
        root: the folder or file.

    Raises:
        UserError: it is neither.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if root.is_dir():
            files = ((_stem(path.name), path) for path in sorted(root.iterdir()))
            found = [(n, Part(str(path), path=path)) for n, path in files if n and path.is_file()]
        elif root.suffix == ".npz":
            found = [(n, Part(f"{root}: {n}", path=root, name=n)) for n in _names(root)]
        else:
            raise UserError(f"data.root: expected a folder or an .npz, got {root}")
        self._parts = found
        self._asked: set[str] = set()

    def find(self, *names: str) -> "Part | None":
        """The part with one of these names.

        Raises:
            UserError: there are several.
        """
        self._asked.update(names)
        found = [part for name, part in self._parts if name in names]
        if len(found) > 1:
            raise UserError(f"data.root: expected one of {', '.join(p.where for p in found)}")
        return found[0] if found else None

    def expect(self, *names: str) -> "Part":
        """As `find`; a `UserError` if there is none."""
        part = self.find(*names)
        if part is None:
            is_folder = self.root.is_dir()
            raise UserError(
                f"data.root: {self.root} has no {'file' if is_folder else 'array'} "
                + " or ".join(names)
                + f" with an ending of {', '.join((*ARRAYS, *TABLES))}" * is_folder
            )
        return part

    def unused(self) -> list[str]:
        """The names of the parts that nobody asked for."""
        return [name for name, _ in self._parts if name not in self._asked]


class Part:
    """An array or a table.

    Attributes:
        where: what it is called in messages.
        path: its file.
        rows: how many a table should have, if that is known.
        skipped: rows of a table that turned out to be no values, but a header.
    """

    def __init__(
        self, where: str, *, path: Path, name: str | None = None, rows: int | None = None
    ) -> None:
        self.where = where
        self.path = path
        self.rows = rows
        self.skipped = 0
        self._name = name

    @property
    def is_table(self) -> bool:
        """Whether it is read by the row."""
        return self.path.name.endswith(TABLES)

    @property
    def is_text(self) -> bool:
        return self.path.name.endswith(TEXT)

    @property
    def may_have_header(self) -> bool:
        """Whether the first row of words may be a header: Parquet and an index bring their own."""
        return self.is_text and not Form.of(self.path).has_index

    @property
    def is_numbered(self) -> bool:
        """Whether the first row may be a header or values (see `Form`)."""
        return self.is_text and Form.of(self.path).is_numbered

    def say_if_numbered(self, what: str) -> None:
        """A line, if the first row is values or a header and is taken for values."""
        if self.is_numbered:
            rank_zero_info(f"{self.where}: the first row is read as {what}, not as a header")

    def refuse_index(self, values: np.ndarray, what: str, names: Sequence[str] = ()) -> None:
        """UserError if the first of several columns of a table counts the rows, in any order, as an
        index that was given a name, or has the names of the nodes.

        Args:
            values: [rows, columns], of a file whose form is not known (`rows` is None).
            what: a column is, if it is no index.
        """
        if not self.is_table or self.rows is not None or values.ndim < 2 or values.shape[1] < 2:
            return
        first = values[:, 0]
        counted = np.arange(len(first), dtype=first.dtype)
        is_index = any(np.array_equal(np.sort(first), counted + start) for start in (0, 1))
        numbers = numbers_of(np.array(names, str))
        if numbers.dtype.kind != "U":
            is_index |= np.array_equal(first, numbers.astype(first.dtype))
        if len(first) > 1 and is_index:
            raise UserError(
                f"{self.where}: the first column counts the rows or names the nodes: it is an "
                f"index, or {what}; leave out an index, and put {what} behind another column"
            )

    def place_of(self, row: int) -> str:
        """Where a row is: the file and, of a table, the line."""
        line = line_of(self.path, row + self.skipped) if self.is_table else ""
        return f"{self.where}{line}"

    def array(
        self, dtype: Any = None, columns: int | None = None, *, in_order: bool = False
    ) -> np.ndarray:
        """The whole of it; that of an .npy is mapped, so that only what is used is read.

        Args:
            dtype, columns, in_order: of a table, see `table`.
        """
        if self.is_table:
            return table(self.path, dtype, columns, self.rows, in_order=in_order)
        if self.path.suffix == ".npy":
            return mapped(self.path)
        if self._name is not None:
            return load_npz(self.path, self._name)
        names = _names(self.path)
        if len(names) != 1:
            raise UserError(f"{self.path}: expected one array, got {', '.join(names) or 'none'}")
        return load_npz(self.path, names[0])

    def words(self, count: int | None = None) -> tuple[np.ndarray, Callable[[int], str]]:
        """What stands in it, see `cells`, and the place of a row; of an array the array.

        What has one column is [rows].
        """
        if self.is_table:
            found, lines = cells(self.path, count)
            return (
                found,
                lambda row: f"{self.where}, {f'line {lines[row]}' if lines else f'row {row}'}",
            )
        found = self.array()
        if found.dtype.kind == "S":
            found = np.char.decode(found, "utf-8")
        found = found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
        return found, lambda row: self.where


def mapped(path: Path) -> np.ndarray:
    """The array of an .npy, memory-mapped; what is written to it stays in memory.

    Raises:
        UserError: it is none, holds objects or ends early.
    """
    refuse_stand_in(path)
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        size = path.stat().st_size
        if not size:
            raise UserError(f"{path}: is empty") from error
        if "mmap length is greater" in str(error):
            raise UserError(f"{path}: ends early, after {size:,} bytes") from error
        raise UserError(f"{path}: is not an array: {_why(error)}") from error


def load_npz(path: Path, name: str) -> np.ndarray:
    """An array of an .npz, without unpickling anything.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return file[name]
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise UserError(f"{path}: {name} is not a whole array: {_why(error)}") from error


def _names(path: Path) -> list[str]:
    """Of the arrays in an .npz."""
    refuse_stand_in(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return list(file.files)
    except (AttributeError, OSError, EOFError, ValueError, TypeError, BadZipFile) as error:
        raise UserError(f"{path}: is not a whole .npz: {_why(error)}") from error


def _why(error: Exception) -> str:
    """NumPy's reason, without its advice to unpickle what may be anything."""
    text = first_line(error)
    if "Object arrays" in text or "Python objects" in text:
        return "it holds Python objects, which are not loaded; save numbers or text"
    return "another kind of file" if "pickle" in text else text


def _stem(name: str) -> str:
    """The name of a part without its ending; nothing of other files."""
    endings = [ending for ending in (*ARRAYS, *TABLES) if name.endswith(ending)]
    return name.removesuffix(max(endings, key=len)) if endings else ""
