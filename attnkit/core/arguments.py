"""Checks of arguments. A message names the argument, what was expected and what was given."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def in_a_line(given: object) -> str:
    """What was given, in one line: of a tensor its type and shape."""
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)} of {given.dtype}"
    return " ".join(repr(given).split())


def at_least(least: float, **arguments: float | None) -> None:
    """ValueError unless each is a finite number of at least `least`; None is not checked."""
    for name, value in arguments.items():
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def positive(**arguments: object) -> None:
    """Each number is positive and finite; a tensor is not read, since that waits for its device."""
    for name, value in arguments.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise ValueError(f"{name}: expected a positive number, got {value}")


def as_number(name: str, given: Any) -> float:
    """A number of Python, NumPy or torch as Python's.

    Raises:
        TypeError: it is none.
    """
    try:
        if not isinstance(given, str | bytes):
            return float(given)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name}: expected a number, got {in_a_line(given)}")


def odd(**arguments: int) -> None:
    """Each is a positive odd number."""
    for name, value in arguments.items():
        if value < 1 or value % 2 == 0:
            raise ValueError(f"{name}: expected an odd number, got {value}")


def share(**arguments: float) -> None:
    """Each is a number in [0, 1)."""
    for name, value in arguments.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value}")


def up_to_1(**arguments: float | None) -> None:
    """Each is a number in [0, 1]; None is not checked."""
    for name, value in arguments.items():
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: expected 0 <= {name} <= 1, got {value}")


def held_out(**fractions: float) -> None:
    """Each fraction takes something, and all together leave something."""
    given = list(fractions.values())
    if not (min(given) > 0 and sum(given) < 1):
        raise ValueError(
            f"{', '.join(fractions)}: expected above 0 and a sum below 1, "
            f"got {' + '.join(map(str, given))}"
        )


def choice(choices: Iterable[object], **arguments: object) -> None:
    """Each is one of the choices."""
    *others, last = choices
    for name, value in arguments.items():
        if value not in (*others, last):
            expected = " or ".join(filter(None, [", ".join(map(repr, others)), repr(last)]))
            raise ValueError(f"{name}: expected {expected}, got {value!r}")


def existing(name: str, given: str | Path | None, *, folder: bool) -> Path:
    """The file or folder that an argument names, as an absolute path.

    Raises:
        ValueError: there is none.
    """
    kind = "folder" if folder else "file"
    if given is None:
        raise ValueError(f"{name}: expected a {kind}, got nothing")
    path = Path(given).expanduser().absolute()
    if not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{name}: no such {kind}: {given}")
    return path


def whole(size: Any) -> int | None:
    """An integer of Python, NumPy or torch as Python's; None for what is none."""
    if isinstance(size, int):
        return size
    try:
        return index(size)
    except TypeError:
        return None


def as_tensor(name: str, given: Any) -> Tensor:
    """A tensor, from a list, a tuple or an array too.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(given, Tensor):
        return given
    is_text = isinstance(given, str | bytes)
    if not is_text and (isinstance(given, Sequence) or hasattr(given, "__array__")):
        with suppress(TypeError, ValueError, RuntimeError):
            tensor = torch.as_tensor(given)
            # a list without numbers is none of floats
            return tensor if tensor.numel() or hasattr(given, "__array__") else tensor.long()
    raise TypeError(f"{name}: expected a tensor or a list of numbers, got {in_a_line(given)}")


def tensors_only(**arguments: object) -> None:
    """TypeError where one is no tensor."""
    for name, given in arguments.items():
        if not isinstance(given, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(given).__name__}")


def not_nested(**tensors: object) -> None:
    """TypeError where a tensor is nested; only attention without any option takes those."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_nested:
            raise TypeError(
                f"{name}: nested tensors are not supported; pad them and give "
                "mask=attnkit.Padding(lengths), or concatenate them and give "
                "mask=attnkit.Packed(lengths)"
            )


def floating(name: str, tensor: object, query: Tensor) -> None:
    """It is a floating-point tensor where the query is."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {given}")
    if tensor.device != query.device:
        raise ValueError(f"{name}: is on {tensor.device}, but query is on {query.device}")


def divides(divisor_name: str, divisor: int, **totals: int) -> None:
    """ValueError unless the divisor is at least 1 and divides the total."""
    for name, total in totals.items():
        if divisor < 1 or total % divisor:
            raise ValueError(f"{divisor_name}: {divisor} does not divide {name} {total}")


def pair(name: str, size: object) -> tuple[int, int]:
    """Height and width from a positive integer, which is both, or two."""
    sides: Any = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise ValueError(f"{name}: expected a positive integer or two, got {size!r}")
    return sides
