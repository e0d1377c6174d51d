"""`attnkit.masks`, `scores`, `normalizers` and `positions` hold all of their kind."""

import inspect
import pkgutil
from importlib import import_module

import pytest

import attnkit

# What the files of a package hold beside its kind.
OTHERS = {"Adjacency", "Chunks", "Kept", "SplitNodes", "cached"}


@pytest.mark.parametrize("name", ["masks", "scores", "normalizers", "positions"])
def test_a_package_holds_every_class_of_its_files(name):
    package = getattr(attnkit, name)
    assert package.__name__ == f"attnkit.core.{name}"
    files = pkgutil.iter_modules(getattr(package, "__path__", ()))  # none of a file
    modules = [package, *(import_module(f"{package.__name__}.{file.name}") for file in files)]
    written = {
        found.__name__
        for module in modules
        for found in vars(module).values()
        if inspect.isclass(found) and found.__module__ == module.__name__
    }
    public = {found for found in written if not found.startswith("_")} - OTHERS
    assert len(public) >= 5
    assert public <= set(package.__all__)
    assert all(hasattr(package, found) for found in package.__all__)


def test_every_subclass_is_in_its_package():
    for package, base in (
        (attnkit.masks, attnkit.masks.Mask),
        (attnkit.scores, attnkit.scores.Score),
        (attnkit.normalizers, attnkit.normalizers.Normalizer),
    ):
        kinds = [base]
        for kind in kinds:
            kinds += kind.__subclasses__()
        ours = [kind for kind in kinds if kind.__module__.startswith("attnkit.")]
        assert len(ours) >= 5
        for kind in ours:
            assert kind.__name__.startswith("_") or getattr(package, kind.__name__) is kind


def test_names_of_the_public_table_are_those_of_the_packages():
    for package in (attnkit.masks, attnkit.scores, attnkit.normalizers, attnkit.positions):
        shared = set(package.__all__) & set(attnkit.__all__)
        assert len(shared) >= 4
        assert all(getattr(attnkit, name) is getattr(package, name) for name in shared)
