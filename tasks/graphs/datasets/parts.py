"""Finds the parts of a graph by name: files of a folder, or arrays of one .npz."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.datasets.part import Form, Part, are_whole, refuse_stand_in
from attnkit.tasks.graphs.datasets.text import TEXT, Text

ROWS = 1_000_000  # rows that are converted to Python's texts at a time


class Parquet(Part):
    """A Parquet file; columns without a name and pandas' index columns form its index."""

    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        found = self._columns()
        whole = np.issubdtype(dtype, np.integer)
        expected = "whole numbers" if whole else "numbers"
        if columns not in (None, len(found)):
            names = list(found)
            raise UserError(f"{self.path}: expected {columns} columns of {expected}, got {names}")
        numbers = np.empty((len(next(iter(found.values()))), len(found)), dtype)
        for place, (name, column) in enumerate(found.items()):
            values = column.to_numpy()
            if values.dtype.kind not in "iufb" or (whole and not are_whole(values).all()):
                raise UserError(
                    f"{self.path}: column {name}: expected {expected}, got {values.dtype}"
                )
            numbers[:, place] = values
        return numbers

    def _words(self, count: int | None) -> np.ndarray:
        return np.stack(list(map(_texts, self._columns().values())), axis=1)

    def fields(self) -> Iterator[tuple[list[str], str]]:
        columns = list(self._columns().values())
        for start in range(0, len(columns[0]), ROWS):
            words = (_texts(column.slice(start, ROWS)).astype(str).tolist() for column in columns)
            for row, fields in enumerate(zip(*words, strict=True), start):
                yield list(fields), f", row {row}"

    def place_of(self, row: int) -> str:
        return f"{self.where}, row {row + self._skipped}"

    def _columns(self) -> dict[str, Any]:
        """Return Arrow's columns by name, without those of the index."""
        refuse_stand_in(self.path)
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise UserError(
                f"{self.path}: Parquet needs pyarrow: pip install 'attnkit[parquet]'"
            ) from error
        try:
            with ParquetFile(self.path) as file:
                table = file.read()
        except (ArrowException, OSError) as error:
            raise UserError(f"{self.path}: cannot be read: {first_line(error)}") from error
        described = (table.schema.pandas_metadata or {}).get("index_columns", ())
        columns = dict(zip(table.column_names, table.columns, strict=True))
        self.index = [
            (f"its index {name!r}", columns.pop(name).to_numpy())
            for name in table.column_names
            if name in described or re.fullmatch(r"Unnamed: \d+|", name)
        ]
        for i in described:
            if isinstance(i, dict) and i.get("kind") == "range":  # only in the metadata
                numbers = np.arange(i["start"], i["stop"], i["step"])
                if len(numbers) == table.num_rows:  # pandas ignores an index of another length
                    self.index.append((f"its index {i['start']}, …", numbers))
        if not columns:
            raise UserError(f"{self.path}: expected columns of values, got none")
        self.form = Form(header=list(columns))
        return columns


def _texts(column: Any) -> np.ndarray:
    """Return words as text, with "" for missing ones; numbers stay as they are."""
    values = column.to_numpy()
    if values.dtype.kind != "O":
        return values
    return np.array(["" if word is None else str(word) for word in values], str)


ARRAYS = (".npy", ".npz")
ENDINGS = (*ARRAYS, *TEXT, ".parquet")


class Parts:
    """The parts of a graph in a folder or an .npz.

    A folder has a file for each part: `<name>.npy`, `.npz` with one array, `.csv`, `.tsv`, `.txt`
    (the last three also with `.gz`), or `.parquet`. An .npz has an array for each part.

    Args:
        root: the folder or file.

    Raises:
        UserError: `root` is neither.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if root.is_dir():
            files = ((_stem(path.name), path) for path in sorted(root.iterdir()))
            found = [(n, part_of(path)) for n, path in files if n and path.is_file()]
        elif root.suffix == ".npz":
            found = [(n, Array(root, f"{root}: {n}", name=n)) for n in _names(root)]
        else:
            raise UserError(f"data.root: expected a folder or an .npz, got {root}")
        self._parts = found
        self._asked: set[str] = set()

    def find(self, *names: str) -> "Part | None":
        """Return the part with one of these names, or None.

        Raises:
            UserError: there are several.
        """
        self._asked.update(names)
        found = [part for name, part in self._parts if name in names]
        if len(found) > 1:
            raise UserError(f"data.root: expected one of {', '.join(p.where for p in found)}")
        return found[0] if found else None

    def expect(self, *names: str) -> "Part":
        """Return the part with one of these names; raise a `UserError` if there is none."""
        part = self.find(*names)
        if part is None:
            is_folder = self.root.is_dir()
            raise UserError(
                f"data.root: {self.root} has no {'file' if is_folder else 'array'} "
                + " or ".join(names)
                + f" with an ending of {', '.join(ENDINGS)}" * is_folder
            )
        return part

    def unused(self) -> list[str]:
        """Return the names of the parts that were not read."""
        return [name for name, _ in self._parts if name not in self._asked]


class Array(Part):
    """The array of an .npy or an .npz.

    Args:
        path: the file.
        where: its name in messages.
        name: the name of the array in an .npz; None: the only one.
    """

    is_table = False

    def __init__(self, path: Path, where: str = "", *, name: str | None = None) -> None:
        super().__init__(path, where)
        self._name = name

    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        """Return the array; an .npy is mapped, so that only the rows in use are read."""
        if self.path.suffix == ".npy":
            return _mapped(self.path)
        names = _names(self.path) if self._name is None else [self._name]
        if len(names) != 1:
            raise UserError(f"{self.path}: expected one array, got {', '.join(names) or 'none'}")
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return file[names[0]]
        except (OSError, EOFError, ValueError, BadZipFile) as error:
            why = _why(error)
            raise UserError(f"{self.path}: {names[0]} is not a whole array: {why}") from error

    def _words(self, count: int | None) -> np.ndarray:
        found = self.array()
        return np.char.decode(found, "utf-8") if found.dtype.kind == "S" else found

    def place_of(self, row: int) -> str:
        return self.where


def part_of(path: Path, *, rows: int | None = None) -> Part:
    """Return the reader of a file, chosen by its ending.

    Args:
        path: the file.
        rows: see `Part`.
    """
    if path.name.endswith(ARRAYS):
        return Array(path)
    return (Parquet if path.suffix == ".parquet" else Text)(path, rows=rows)


def _mapped(path: Path) -> np.ndarray:
    """Return the array of an .npy, memory-mapped; changes to it stay in memory."""
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


def _names(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz."""
    refuse_stand_in(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return list(file.files)
    except (AttributeError, OSError, EOFError, ValueError, TypeError, BadZipFile) as error:
        raise UserError(f"{path}: is not a whole .npz: {_why(error)}") from error


def _why(error: Exception) -> str:
    """Return NumPy's reason, without its advice to unpickle untrusted files."""
    text = first_line(error)
    if "Object arrays" in text or "Python objects" in text:
        return "it holds Python objects, which are not loaded; save numbers or text"
    return "another kind of file" if "pickle" in text else text


def _stem(name: str) -> str:
    """Return the name of a part without its ending, or an empty text for other files."""
    endings = [ending for ending in ENDINGS if name.endswith(ending)]
    return name.removesuffix(max(endings, key=len)) if endings else ""
