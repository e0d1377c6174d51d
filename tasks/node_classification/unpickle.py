"""Reading the pickles of Planetoid's files without running anything they hold.

A pickle is a program: it imports and calls what it names. Here nothing is imported. The few names
that such files need stand for small classes of ours, which keep their arguments; these are then
checked as data. NumPy's and SciPy's own `__setstate__` are not used, as a wrong state can crash
them.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnkit.lightning.errors import UserError, first_line

_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_CSR_MATRIX = ("scipy.sparse.csr.csr_matrix", "scipy.sparse._csr.csr_matrix")
_BUILTINS = ("builtins", "__builtin__")
NAMES = frozenset(
    (
        *("numpy.dtype", "numpy.ndarray", *_RECONSTRUCT, *_CSR_MATRIX),
        *("_codecs.encode", "collections.defaultdict"),
        *(f"{home}.{name}" for home in _BUILTINS for name in ("dict", "list", "int")),
    )
)
"""The names that a file may hold."""

_NUMBER = re.compile(r"[<>|=]?[fiub][1248]")


class Csr(NamedTuple):
    """A sparse matrix by rows: the numbers in row r are values[offsets[r]:offsets[r + 1]]."""

    offsets: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]


def load(path: Path) -> Any:
    """The number array, `Csr` or dict of lists of int that a file holds.

    Raises:
        UserError: the file names anything else (the name is said), or is broken.
    """
    try:
        with path.open("rb") as file:
            return _plain(_Unpickler(file, encoding="latin1").load())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything
        reason = first_line(error)
        raise UserError(f"{path} is not a file of Planetoid: {reason}") from error


class _Dtype:
    """What `numpy.dtype(code)` is called for."""

    def __init__(self, code: str, *flags: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def plain(self) -> np.dtype:
        code = f"{self.order}{self.code}"
        if not isinstance(self.code, str) or not _NUMBER.fullmatch(code):
            raise pickle.UnpicklingError(f"an array of {code[:20]!r}, expected numbers")
        return np.dtype(code)


class _Array:
    """What `numpy.ndarray` is rebuilt as."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def plain(self) -> np.ndarray:
        _, shape, dtype, by_columns, data = self.state
        # Python 2's str are bytes, which encoding="latin1" reads as text.
        data = data.encode("latin1") if isinstance(data, str) else data
        array = np.frombuffer(data, dtype.plain())
        return array.reshape(shape, order="F" if by_columns else "C")


class _CsrMatrix:
    """What `scipy.sparse.csr_matrix` is rebuilt as."""

    state: dict[str, Any] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state

    def plain(self) -> Csr:
        assert self.state is not None
        parts = (self.state[name].plain() for name in ("indptr", "indices", "data"))
        offsets, columns, values = parts
        rows, width = map(int, self.state.get("_shape") or self.state["shape"])
        whole = (
            offsets.shape == (rows + 1,)
            and offsets[0] == 0
            and offsets[-1] == len(columns) == len(values)
            and (np.diff(offsets) >= 0).all()
            and (columns.ndim, values.ndim) == (1, 1)
            and (not len(columns) or (columns.min() >= 0 and columns.max() < width))
        )
        if not whole:
            raise pickle.UnpicklingError("a sparse matrix whose parts do not fit together")
        return Csr(offsets, columns, values, (rows, width))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Made for each name, as a pickle can change the attributes of an object.
        known: dict[str, Any] = {
            "numpy.dtype": _Dtype,
            "numpy.ndarray": _Array,
            **dict.fromkeys(_RECONSTRUCT, lambda cls, shape, code: _Array()),
            **dict.fromkeys(_CSR_MATRIX, _CsrMatrix),
            "_codecs.encode": lambda text, encoding: _encoded(text, encoding),
            "collections.defaultdict": defaultdict,
            **{f"{home}.{cls.__name__}": cls for home in _BUILTINS for cls in (dict, list, int)},
        }
        if (found := known.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return found


def _encoded(text: str, encoding: str) -> bytes:
    """Python 3's way to write bytes in an old pickle."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding!r}, expected latin1")
    return text.encode("latin1")


def _plain(loaded: Any) -> Any:
    if isinstance(loaded, (_Array, _CsrMatrix)):
        return loaded.plain()
    if isinstance(loaded, dict):
        for node, neighbors in loaded.items():
            numbers = [node, *neighbors] if isinstance(neighbors, list) else [neighbors]
            if any(type(number) is not int for number in numbers):
                raise pickle.UnpicklingError(f"no list of nodes at {node!r}")
        return dict(loaded)
    raise pickle.UnpicklingError(f"a {type(loaded).__name__}, expected an array, matrix or dict")
