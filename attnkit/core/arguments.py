"""Checks of arguments. A message names the argument, what was expected and what was given."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def in_a_line(given: object) -> str:
    """Return the repr of an argument in one line; for a tensor its shape and dtype."""
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)} of {given.dtype}"
    return " ".join(repr(given).split())


def at_least(least: float, **arguments: float | None) -> None:
    """Raise ValueError unless each is a finite number ≥ `least`; None is not checked."""
    for name, value in arguments.items():
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def positive(**arguments: object) -> None:
    """Raise ValueError unless each number is positive and finite; tensors are not checked, since
    reading them waits for the device."""
    for name, value in arguments.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise ValueError(f"{name}: expected a positive number, got {value}")


def as_number(name: str, given: Any) -> float:
    """Return a number of Python, NumPy or torch as a float.

    Raises:
        TypeError: it is not a number.
    """
    try:
        if not isinstance(given, str | bytes):
            return float(given)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name}: expected a number, got {in_a_line(given)}")


def odd(**arguments: int) -> None:
    """Raise ValueError unless each is a positive odd number."""
    for name, value in arguments.items():
        if value < 1 or value % 2 == 0:
            raise ValueError(f"{name}: expected an odd number, got {value}")


def share(**arguments: float) -> None:
    """Raise ValueError unless each is a number in [0, 1)."""
    for name, value in arguments.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value}")


def up_to_1(**arguments: float | None) -> None:
    """Raise ValueError unless each is a number in [0, 1]; None is not checked."""
    for name, value in arguments.items():
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: expected 0 <= {name} <= 1, got {value}")


def held_out(**fractions: float) -> None:
    """Raise ValueError unless each fraction is above 0 and their sum is below 1."""
    given = list(fractions.values())
    if not (min(given) > 0 and sum(given) < 1):
        raise ValueError(
            f"{', '.join(fractions)}: expected above 0 and a sum below 1, "
            f"got {' + '.join(map(str, given))}"
        )


def choice(choices: Iterable[object], **arguments: object) -> None:
    """Raise ValueError unless each is one of the choices."""
    *others, last = choices
    for name, value in arguments.items():
        if value not in (*others, last):
            expected = " or ".join(filter(None, [", ".join(map(repr, others)), repr(last)]))
            raise ValueError(f"{name}: expected {expected}, got {value!r}")


def existing(name: str, given: str | Path | None, *, folder: bool) -> Path:
    """Return the file or folder that an argument names, as an absolute path.

    Raises:
        ValueError: it does not exist.
    """
    kind = "folder" if folder else "file"
    if given is None:
        raise ValueError(f"{name}: expected a {kind}, got nothing")
    path = Path(given).expanduser().absolute()
    if not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{name}: no such {kind}: {given}")
    return path


def whole(size: Any) -> int | None:
    """Return an integer of Python, NumPy or torch as an int; None for any other object."""
    if isinstance(size, int):
        return size
    try:
        return index(size)
    except TypeError:
        return None


def as_tensor(name: str, given: Any) -> Tensor:
    """Return a tensor, also from a list, a tuple or an array.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(given, Tensor):
        return given
    is_text = isinstance(given, str | bytes)
    if not is_text and (isinstance(given, Sequence) or hasattr(given, "__array__")):
        with suppress(TypeError, ValueError, RuntimeError):
            tensor = torch.as_tensor(given)
            # torch makes an empty list a float tensor; integers are meant
            return tensor if tensor.numel() or hasattr(given, "__array__") else tensor.long()
    raise TypeError(f"{name}: expected a tensor or a list of numbers, got {in_a_line(given)}")


def tensors_only(**arguments: object) -> None:
    """Raise TypeError if an argument is not a tensor."""
    for name, given in arguments.items():
        if not isinstance(given, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(given).__name__}")


def not_nested(**tensors: object) -> None:
    """Raise TypeError if a tensor is nested; only attention without options supports these."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_nested:
            raise TypeError(
                f"{name}: nested tensors are not supported; pad them and give "
                "mask=attnkit.Padding(lengths), or concatenate them and give "
                "mask=attnkit.Packed(lengths)"
            )


def floating(name: str, tensor: object, query: Tensor) -> None:
    """Raise TypeError or ValueError unless it is a floating-point tensor on the query's device."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {given}")
    if tensor.device != query.device:
        raise ValueError(f"{name}: is on {tensor.device}, but query is on {query.device}")


def divides(divisor_name: str, divisor: int, **totals: int) -> None:
    """Raise ValueError unless the divisor is at least 1 and divides the totals."""
    for name, total in totals.items():
        if divisor < 1 or total % divisor:
            raise ValueError(f"{divisor_name}: {divisor} does not divide {name} {total}")


def pair(name: str, size: object) -> tuple[int, int]:
    """Return height and width, given as one positive integer for both or as two."""
    sides: Any = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise ValueError(f"{name}: expected a positive integer or two, got {size!r}")
    return sides
