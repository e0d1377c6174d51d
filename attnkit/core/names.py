"""Names: public tables of packages whose names are imported when they are first used, and the name
most similar to a wrong one, for error messages.

A package writes its names once, as imports that only type checkers run:

    if TYPE_CHECKING:
        from attnkit.layers.cbam import BAM
    else:
        __getattr__, __dir__ = lazy(__name__)

so that `attnkit.layers.BAM` imports only its own file. This module imports no torch, and of Python
only modules that every start has loaded: `python -m attnkit` has the working directory on the path,
where there may be a file ast.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

TYPE_CHECKING = False  # type checkers treat this name like typing.TYPE_CHECKING
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_tables: dict[str, dict[str, tuple[str, str]]] = {}


def homes(package: str) -> dict[str, tuple[str, str]]:
    """Return the names of a package's table, each with its module and its name there."""
    if package not in _tables:
        import ast

        spec: Any = sys.modules[package].__spec__
        tree = ast.parse(spec.loader.get_source(package))
        _tables[package] = {
            alias.asname or alias.name: (node.module, alias.name)
            for block in tree.body
            if isinstance(block, ast.If)
            for node in block.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
    return _tables[package]


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, for the names of its table and `__all__`."""
    names = vars(sys.modules[package])

    def getattr_(name: str) -> Any:
        if name == "__all__":
            return [*homes(package)]
        if name.startswith("__") or name not in homes(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes(package)[name]
        home = vars(import_module(module))
        # the imported name may itself be a submodule
        found = home[original] if original in home else import_module(f"{module}.{original}")
        names[name] = found
        return found

    def dir_() -> list[str]:
        return sorted({*names, *homes(package)})

    return getattr_, dir_


def nearest(name: object, names: Iterable[str], *, cutoff: float = 0.55) -> str:
    """Return `; did you mean …?` with the most similar of the names, or "".

    Args:
        cutoff: the least similarity, from 0 to 1.
    """
    close = get_close_matches(str(name), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
