"""Constructors are read from source as Python would find them."""

import importlib
import inspect
import sys

import pytest

from attnkit.launch.config.signatures import signature_of

SOURCE = """
from dataclasses import dataclass
from elsewhere import Unreadable

class Root:
    def __init__(self): ...

class Task(Root):
    def __init__(self, batch_size, **options):
        super().__init__(**options)

class Mixin: ...
class RootedMixin(Root): ...
class UnreadableMixin(Unreadable): ...

class Plain(Mixin, Task): ...
class Rooted(RootedMixin, Task): ...
class Blind(UnreadableMixin, Task): ...

class Passing(RootedMixin, Task):
    def __init__(self, native=False, **options):
        super().__init__(**options)

@dataclass
class Fields:
    size: int

class OfFields(Mixin, Fields): ...
class Bare(Mixin): ...
class Hidden(UnreadableMixin): ...
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "of_signatures.py").write_text(SOURCE)
    (tmp_path / "elsewhere.py").write_text("Unreadable = type('Unreadable', (), {})\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("of_signatures")
    for name in ("of_signatures", "elsewhere"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "Plain": ["batch_size"],
        "Rooted": ["batch_size"],
        "Blind": ["batch_size"],
        "Passing": ["native", "batch_size"],
        "OfFields": ["size"],
        "Bare": [],
    }.items(),
)
def test_a_base_may_stand_before_that_with_the_constructor(module, name, expected):
    found = signature_of(f"of_signatures.{name}")
    assert [*found.parameters] == expected
    first = next(iter(inspect.signature(getattr(module, name)).parameters), None)
    assert first in (expected[0] if expected else None, "args", "kwargs")


def test_what_cannot_be_read_is_not_said(module):
    assert signature_of("of_signatures.Hidden") is None
