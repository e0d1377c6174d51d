"""Restricts libraries that unpickle files to the names that data needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from attnkit.lightning.errors import UserError
from attnkit.tasks.node_classification.unpickle import NAMES

_guarding: ContextVar[str] = ContextVar("attnkit_guarded_reader", default="")


@contextmanager
def only_data(reader: str) -> Iterator[None]:
    """Inside, unpickling anything but numbers and containers is an error, before it is run.

    Python tells its audit hooks of every name that a pickle looks up, whoever reads it. (What
    torch reads with `weights_only=True` is checked by torch, without such a look-up.)

    Args:
        reader: who reads, for the message.

    Raises:
        UserError: names what was looked up.
    """
    _install()
    token = _guarding.set(reader)
    try:
        yield
    finally:
        _guarding.reset(token)


@cache
def _install() -> None:
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and (reader := _guarding.get()):
        name = ".".join(map(str, arguments))
        if name not in NAMES:
            raise UserError(f"data: a file that {reader} reads names {name}, which is refused")
