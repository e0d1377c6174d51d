"""Files are composed once for each state of theirs, and constructors read from their source."""

import importlib
import inspect
import os
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from attnkit.launch.config import _hydra
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.signatures import signature_of


@pytest.fixture
def loader(tmp_path, monkeypatch):
    """Of the user's own two files, which are all there are; and how often they are composed."""
    GlobalHydra.instance().clear()
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [model: a, _self_]\nkey: ${model.size}\n")
    (tmp_path / "model" / "a.yaml").write_text("size: 1")
    (tmp_path / "model" / "b.yaml").write_text("size: 2")
    monkeypatch.setattr(_hydra, "_COMPOSED", {})
    return _hydra.Loader(_hydra.create_config_search_path(f"file://{tmp_path}"), tmp_path)


def _composed(loader, *words):
    return loader.load_configuration("config", list(words), RunMode.RUN)


def test_a_composition_is_remembered_and_is_the_callers_own(loader, monkeypatch):
    assert _composed(loader).key == 1
    first = _composed(loader, "model=b")
    monkeypatch.setattr(
        _hydra.ConfigLoaderImpl, "load_configuration", None
    )  # nothing can be composed
    again = _composed(loader, "model=b")
    assert first == again
    assert first._metadata.flags == again._metadata.flags
    again.model.size = 3
    assert again.key == 3
    assert _composed(loader, "model=b").key == first.key == 2


def test_a_changed_or_new_file_and_another_folder_are_seen(loader, tmp_path, monkeypatch):
    path = tmp_path / "model" / "a.yaml"
    assert _composed(loader).key == 1
    state = path.stat().st_mtime_ns
    path.write_text("size: 5")
    os.utime(path, ns=(state, state + 1))
    assert _composed(loader).key == 5
    monkeypatch.chdir(tmp_path)
    assert _composed(loader).hydra.runtime.cwd == str(Path.cwd())


def test_what_depends_on_more_than_the_files_is_composed_again(loader, monkeypatch):
    monkeypatch.setenv("WHICH", "a")
    assert _composed(loader, "model=${oc.env:WHICH}").key == 1
    monkeypatch.setenv("WHICH", "b")
    assert _composed(loader, "model=${oc.env:WHICH}").key == 2
    loader.shipped = None
    _composed(loader)
    assert _hydra._COMPOSED == {}


def test_only_shipped_files_are_remembered(tmp_path):
    assert Composer().loader.shipped
    assert Composer(tmp_path).loader.shipped is None


# --- constructors ---------------------------------------------------------------------------------


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
