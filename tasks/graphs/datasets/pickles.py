"""Checks of pickles of graph data, so that no code in them runs and no content crashes a library.

A pickle is a program: it imports and calls what it names. Only the few names that numbers, lists
and sparse matrices need are allowed. `check_pickle` imports nothing: these names stand for small
classes of ours, because a wrong state can crash NumPy's and SciPy's own.
"""

import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attnkit.lightning.errors import UserError, first_line

_NUMBER = re.compile(r"[<>|=]?[fiub][1248]")
_reader: ContextVar[str] = ContextVar("attnkit_pickle_reader", default="")


def check_pickle(path: Path) -> None:
    """Raise UserError if a file of Planetoid is broken, or names or holds anything but numbers,
    lists, and a sparse matrix whose parts fit together; the message gives the name."""
    try:
        with path.open("rb") as file:
            loaded = _Unpickler(file, encoding="latin1").load()
        if isinstance(loaded, Matrix):  # only now: a pickle can change a part after its use
            loaded.check()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything
        raise UserError(f"{path} is not a file of Planetoid: {first_line(error)}") from error


@contextmanager
def only_data(reader: str) -> Iterator[None]:
    """Context in which unpickling anything but numbers and containers fails before it is run.

    Python calls its audit hooks with every name that a pickle looks up. (Files that torch reads
    with `weights_only=True` are checked by torch, without such a look-up.)

    Args:
        reader: the name of the code that reads, for the message.

    Raises:
        UserError: a pickle looks up another name, which the message gives.
    """
    _audit()
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)


@cache
def _audit() -> None:
    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and (reader := _reader.get()):
            name = ".".join(map(str, arguments))
            if name not in KNOWN:
                raise UserError(f"data: a file that {reader} reads names {name}, which is refused")

    sys.addaudithook(refuse)


# Each has a `__setstate__`, without which a pickle could set attributes of the class itself.
class Dtype:
    """Stands for `numpy.dtype`, which a pickle calls with a code."""

    def __init__(self, code: str, *flags: Any) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("an array with fields, expected numbers")
        self.code = f"{state[1]}{self.code}"


class Array:
    """Stands for `numpy.ndarray`; its state becomes an array of numbers."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        if not _NUMBER.fullmatch(dtype.code):
            raise pickle.UnpicklingError(f"an array of {dtype.code[:20]!r}, expected numbers")
        # Python 2's str are bytes, which encoding="latin1" reads as text.
        data = data.encode("latin1") if isinstance(data, str) else data
        flat = np.frombuffer(data, np.dtype(dtype.code))
        self.array = flat.reshape(shape, order="F" if by_columns else "C")


class Matrix:
    """Stands for `scipy.sparse.csr_matrix`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = dict(state)

    def check(self) -> None:
        """Raise UnpicklingError if an index leads out of the matrix, which SciPy does not check."""
        data, indices, starts = (self.state[name].array for name in ("data", "indices", "indptr"))
        num_rows, num_columns = self.state["_shape"]
        fits = (
            len(starts) == num_rows + 1
            and starts[0] == 0
            and starts[-1] == len(indices) == len(data)
            and (np.diff(starts) >= 0).all()
            and ((indices >= 0) & (indices < num_columns)).all()
        )
        if not fits:
            raise pickle.UnpicklingError("a sparse matrix whose parts do not fit together")


def _encoded(text: str, encoding: str) -> bytes:
    """Return bytes from the text as which Python 3 writes them in an old pickle protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding!r}, expected latin1")
    return text.encode("latin1")


KNOWN: dict[str, Any] = {
    "numpy.dtype": Dtype,
    "numpy.ndarray": Array,
    "numpy.core.multiarray._reconstruct": lambda cls, shape, code: Array(),
    "numpy._core.multiarray._reconstruct": lambda cls, shape, code: Array(),
    "scipy.sparse.csr.csr_matrix": Matrix,
    "scipy.sparse._csr.csr_matrix": Matrix,
    "_codecs.encode": _encoded,
    "collections.defaultdict": defaultdict,
    **{f"{home}.{cls.__name__}": cls for home in ("builtins", "__builtin__")
       for cls in (dict, list, int)},
}  # fmt: skip
"""All names that a pickle of data may look up, and what stands for them in `check_pickle`."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := KNOWN.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return found
