"""Reads pickles of graph data without running any code in them.

A pickle is a program: it imports and calls what it names. Only the few names that numbers, lists
and sparse matrices need are allowed here. Files that we read ourselves import nothing: these names
stand for small classes of ours, because a wrong state can crash NumPy's own `__setstate__`.
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
import torch

from attnkit.lightning.errors import UserError, first_line
from attnkit.tasks.graphs.files.stand_ins import refuse_stand_in

_NUMBER = re.compile(r"[<>|=]?[fiub][1248]")
_reader: ContextVar[str] = ContextVar("attnkit_pickle_reader", default="")


def load(path: Path) -> Any:
    """Return the array of numbers, sparse tensor or dict of lists of int in a file of Planetoid.

    Raises:
        UserError: the file contains any other name, which the message gives, or is broken.
    """
    refuse_stand_in(path)
    try:
        with path.open("rb") as file:
            return _checked(_Unpickler(file, encoding="latin1").load())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything
        raise UserError(f"{path} is not a file of Planetoid: {first_line(error)}") from error


def load_saved(path: Path) -> Any:
    """Load tensors, arrays of numbers (as tensors) and dictionaries that `torch.save` wrote.

    Raises:
        UserError: the file contains any other name, which the message gives, or is broken.
    """
    refuse_stand_in(path)
    known: list[Any] = [(found, name) for name, found in _KNOWN.items() if name.startswith("numpy")]
    try:
        with torch.serialization.safe_globals(known):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle can raise anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            why = f"it names {named[1]}, which is refused"
        else:  # torch's message without its advice to run the code in the file
            message = str(error).rpartition("WeightsUnpickler error:")[2].strip()
            why = message.partition("\n")[0].partition(". ")[0] or "it ends early"
        raise UserError(f"{path} is not a file of tensors and arrays: {why}") from error
    if not isinstance(saved, dict):
        return saved
    return {
        name: torch.from_numpy(one.array.copy()) if isinstance(one, _Array) else one
        for name, one in saved.items()
    }


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
            if name not in _KNOWN:
                raise UserError(f"data: a file that {reader} reads names {name}, which is refused")

    sys.addaudithook(refuse)


# Each has a `__setstate__`, without which a pickle could set attributes of the class itself.
class _Dtype:
    """Stands for `numpy.dtype`, which a pickle calls with a code."""

    def __init__(self, code: str, *flags: Any) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = f"{state[1]}{self.code}"


class _Array:
    """Stands for `numpy.ndarray`; its state becomes an array of numbers."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        if not _NUMBER.fullmatch(dtype.code):
            raise pickle.UnpicklingError(f"an array of {dtype.code[:20]!r}, expected numbers")
        # Python 2's str are bytes, which encoding="latin1" reads as text.
        data = data.encode("latin1") if isinstance(data, str) else data
        flat = np.frombuffer(data, np.dtype(dtype.code))
        self.array = flat.reshape(shape, order="F" if by_columns else "C")


class _Matrix:
    """Stands for `scipy.sparse.csr_matrix`; the numbers of row r begin at indptr[r]."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        offsets, columns, values = (state[name].array for name in ("indptr", "indices", "data"))
        try:
            rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            places = torch.from_numpy(np.stack([rows, columns]))
            values = torch.tensor(values, dtype=torch.float32)
            size = state.get("_shape") or state["shape"]
            made = torch.sparse_coo_tensor(places, values, size, check_invariants=True)
        except (ValueError, RuntimeError) as error:
            message = "a sparse matrix whose parts do not fit together"
            raise pickle.UnpicklingError(message) from error
        self.tensor = made.coalesce()


def _encoded(text: str, encoding: str) -> bytes:
    """Return bytes from the text as which Python 3 writes them in an old pickle protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding!r}, expected latin1")
    return text.encode("latin1")


_KNOWN: dict[str, Any] = {
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": lambda cls, shape, code: _Array(),
    "numpy._core.multiarray._reconstruct": lambda cls, shape, code: _Array(),
    "scipy.sparse.csr.csr_matrix": _Matrix,
    "scipy.sparse._csr.csr_matrix": _Matrix,
    "_codecs.encode": _encoded,
    "collections.defaultdict": defaultdict,
    **{f"{home}.{cls.__name__}": cls for home in ("builtins", "__builtin__")
       for cls in (dict, list, int)},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := _KNOWN.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return found


def _checked(loaded: Any) -> Any:
    if isinstance(loaded, _Array):
        return loaded.array
    if isinstance(loaded, _Matrix):
        return loaded.tensor
    if isinstance(loaded, dict):
        for node, neighbors in loaded.items():
            numbers = [node, *neighbors] if isinstance(neighbors, list) else [neighbors]
            if any(type(number) is not int for number in numbers):
                raise pickle.UnpicklingError(f"expected a list of nodes at {node!r}")
        return dict(loaded)
    raise pickle.UnpicklingError(f"a {type(loaded).__name__}, expected an array, matrix or dict")
