"""The parts of a graph by name: files of a folder, or arrays of one .npz."""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.node_classification.files.tables import TABLES, TEXT, line_of, table

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
        self._arrays: dict[str, np.ndarray] | None = None
        if root.is_dir():
            return
        if root.suffix != ".npz":
            raise UserError(f"data.root: expected a folder or an .npz, got {root}")
        self._arrays = _archive(root)

    def find(self, *names: str) -> "Part | None":
        """The part with one of these names.

        Raises:
            UserError: there are several.
        """
        if self._arrays is not None:
            found = [
                Part(f"{self.root}: {n}", array=self._arrays[n]) for n in names if n in self._arrays
            ]
        else:
            paths = [self.root / f"{n}{ending}" for n in names for ending in (*ARRAYS, *TABLES)]
            found = [Part(str(path), path=path) for path in paths if path.is_file()]
        if len(found) > 1:
            raise UserError(f"data.root: expected one of {', '.join(p.where for p in found)}")
        return found[0] if found else None

    def expect(self, *names: str) -> "Part":
        """As `find`; a `UserError` if there is none."""
        part = self.find(*names)
        if part is None:
            endings = f"with an ending of {', '.join((*ARRAYS, *TABLES))}"
            kind = "no array" if self._arrays is not None else "no file"
            raise UserError(
                f"data.root: {self.root} has {kind} {' or '.join(names)}"
                + f" {endings}" * (self._arrays is None)
            )
        return part


class Part:
    """An array or a table.

    Attributes:
        where: what it is called in messages.
        path: its file, unless it is an array of several in one.
        rows: how many a table should have, if that is known.
    """

    def __init__(
        self,
        where: str,
        *,
        path: Path | None = None,
        array: np.ndarray | None = None,
        rows: int | None = None,
    ) -> None:
        self.where = where
        self.path = path
        self.rows = rows
        self._array = array

    @property
    def is_text(self) -> bool:
        return self.path is not None and self.path.name.endswith(TEXT)

    @property
    def is_table(self) -> bool:
        """Whether it is read by the row."""
        return self.path is not None and self.path.name.endswith(TABLES)

    def place_of(self, row: int) -> str:
        """Where a row is: the file and, of a table, the line."""
        return (
            f"{self.where}{line_of(self.path, row)}" if self.is_table and self.path else self.where
        )

    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        """The whole of it; that of an .npy is mapped, so that only what is used is read.

        Args:
            dtype, columns: of a table.
        """
        if self._array is not None:
            return self._array
        assert self.path is not None
        if self.is_table:
            return table(self.path, dtype, columns, self.rows)
        if self.path.suffix == ".npy":
            return mapped(self.path)
        arrays = _archive(self.path)
        if len(arrays) != 1:
            raise UserError(f"{self.path}: expected one array, got {', '.join(arrays) or 'none'}")
        return next(iter(arrays.values()))


def mapped(path: Path) -> np.ndarray:
    """The array of an .npy, memory-mapped; what is written to it stays in memory.

    Raises:
        UserError: it is none, holds objects or ends early.
    """
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        if path.stat().st_size and "mmap length is greater" in str(error):
            raise UserError(f"{path}: ends early, after {path.stat().st_size:,} bytes") from error
        if not path.stat().st_size:
            raise UserError(f"{path}: is empty") from error
        raise UserError(f"{path}: is not an array: {first_line(error)}") from error


def _archive(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise UserError(f"{path}: is not a whole .npz: {first_line(error)}") from error
