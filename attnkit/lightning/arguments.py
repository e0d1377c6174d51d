"""Checks of arguments; a message names the argument, what is expected and what was given."""

from collections.abc import Sequence
from pathlib import Path


def at_least(least: float, **arguments: float | None) -> None:
    """Each is `least` or more; None is left to others."""
    for name, value in arguments.items():
        if value is not None and value < least:
            raise ValueError(f"{name}: expected {least} or more, got {value}")


def shares(**arguments: float | None) -> None:
    """Each is a number from 0 to 1; None is left to others."""
    for name, value in arguments.items():
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")


def shares_below_1(**arguments: float) -> None:
    """Each is a number in [0, 1)."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}: expected a number in [0, 1), got {value}")


def held_out(**fractions: float) -> None:
    """Each fraction takes something, and all together leave something."""
    given = list(fractions.values())
    if not (min(given) > 0 and sum(given) < 1):
        raise ValueError(
            f"{', '.join(fractions)}: expected above 0 and a sum below 1, "
            f"got {' + '.join(map(str, given))}"
        )


def one_of(choices: Sequence[str], **arguments: str) -> None:
    """Each is one of the choices."""
    for name, value in arguments.items():
        if value not in choices:
            expected = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
            raise ValueError(f"{name}: expected {expected}, got {value!r}")


def existing(name: str, given: str | Path | None, *, folder: bool) -> Path:
    """An argument's file or folder, as an absolute path.

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
