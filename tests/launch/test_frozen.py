"""Nothing that users type or read is lost: frozen.json lists it, freeze.py finds it.

A name that is reported here must come back, or its pattern stands in "released" of the list, with
the sentence that lets it go. `python tests/launch/freeze.py` writes the list anew.
"""

import importlib.util
from fnmatch import fnmatchcase
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def freeze():
    path = Path(__file__).with_name("freeze.py")
    spec = importlib.util.spec_from_file_location("freeze", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lost(frozen, seen, at=""):
    """What was frozen and is not seen, each as `section > … > name`. New names are no loss."""
    if isinstance(frozen, dict):
        there = [name for name in frozen if name in seen]
        gone = [f"{at}{name}" for name in frozen if name not in seen]
        return gone + [line for n in there for line in lost(frozen[n], seen[n], f"{at}{n} > ")]
    if at.startswith("ends"):  # the exit code and the message
        return [] if frozen == seen else [f"{at}{frozen}, now {seen}"]
    if isinstance(frozen, list):
        return [f"{at}{name}" for name in frozen if name not in seen]
    return [] if frozen == seen else [f"{at}{frozen}, now {seen}"]


def held(frozen, seen):
    """What of these sections and runs was lost and not released."""
    frozen_here = {section: frozen[section] for section in seen}
    frozen_here["runs"] = {name: frozen["runs"][name] for name in seen["runs"]}
    lines = lost(frozen_here, seen)
    return [n for n in lines if not any(fnmatchcase(n, known) for known in frozen["released"])]


def test_names_settings_errors_and_files_of_runs(freeze):
    seen = freeze.without_runs() | {"runs": freeze.runs(freeze.FROZEN["quick"])}
    assert held(freeze.FROZEN, seen) == []


@pytest.mark.slow
def test_commands_compose_and_files_of_every_kind_of_run(freeze):
    seen = {"composed": freeze.composed(), "runs": freeze.runs(freeze.FROZEN["runs"])}
    assert held(freeze.FROZEN, seen) == []


def test_what_is_lost_is_named():
    frozen = {"names": ["x", "y"], "runs": {"a": {"exit": 1, "files": ["z"]}, "b": {"exit": 0}}}
    seen = {"names": ["y", "new"], "runs": {"a": {"exit": 2, "new": [], "files": []}}}
    assert lost(frozen, seen) == [
        "names > x", "runs > b", "runs > a > exit > 1, now 2", "runs > a > files > z",
    ]  # fmt: skip
    released = {"released": {"names > *": "", "runs > a > files > z": ""}}
    assert held(frozen | released, seen) == ["runs > a > exit > 1, now 2"]
    assert lost(frozen, frozen) == []
