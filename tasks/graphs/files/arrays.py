"""The parts of a graph by name: files of a folder, or arrays of one .npz."""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.files.parquet import Parquet
from attnkit.tasks.graphs.files.part import Part
from attnkit.tasks.graphs.files.stand_ins import refuse_stand_in
from attnkit.tasks.graphs.files.text import TEXT, Text

ARRAYS = (".npy", ".npz")
ENDINGS = (*ARRAYS, *TEXT, ".parquet")


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
            found = [(n, part_of(path)) for n, path in files if n and path.is_file()]
        elif root.suffix == ".npz":
            found = [(n, Array(root, f"{root}: {n}", name=n)) for n in _names(root)]
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
                + f" with an ending of {', '.join(ENDINGS)}" * is_folder
            )
        return part

    def unused(self) -> list[str]:
        """The names of the parts that nobody asked for."""
        return [name for name, _ in self._parts if name not in self._asked]


class Array(Part):
    """The array of an .npy or an .npz.

    Args:
        name: of the array in an .npz; None: its only one.
    """

    is_table = False

    def __init__(self, path: Path, where: str = "", *, name: str | None = None) -> None:
        super().__init__(path, where)
        self._name = name

    def array(self, dtype: Any = None, columns: int | None = None) -> np.ndarray:
        """The array; that of an .npy is mapped, so that only what is used is read."""
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
    """What reads a file, by its ending.

    Args:
        rows: see `Part`.
    """
    if path.name.endswith(ARRAYS):
        return Array(path)
    return (Parquet if path.suffix == ".parquet" else Text)(path, rows=rows)


def _mapped(path: Path) -> np.ndarray:
    """The array of an .npy, memory-mapped; what is written to it stays in memory."""
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
    endings = [ending for ending in ENDINGS if name.endswith(ending)]
    return name.removesuffix(max(endings, key=len)) if endings else ""
