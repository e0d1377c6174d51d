"""Whose code a configuration may name: attnkit's, its dependencies', and what the user allowed.

Permission is given on the command line only, never by a file: `allow=[mypackage]`, or by
`--config-dir FOLDER` for the modules and packages that lie directly in that folder.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

from attnkit.launch import signatures
from attnkit.lightning.build import PACKAGES
from attnkit.lightning.errors import UserError


@dataclass(frozen=True)
class Consent:
    """Packages the user allowed, and the folder her own configurations and modules are in."""

    packages: tuple[str, ...] = ()
    folder: Path | None = None

    def make_importable(self) -> None:
        """Her folder (and with `allow`, the current one) on the module path, after all others."""
        folders = [self.folder] if self.folder else []
        folders += [Path.cwd()] if self.packages else []
        for folder in folders:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        invalidate_caches()

    def check(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The user's packages that this configuration names; others are refused."""
        named = dict.fromkeys(self.packages)
        for key, target in targets(config):
            package = target.partition(".")[0]
            if package in PACKAGES or package in named:
                continue
            source = signatures.source_of(package)
            if source is None:
                continue  # there is no such package, which validate() says better
            if not self._holds(source):
                raise UserError(
                    f"{key}: {target} is outside the allowed packages ({', '.join(PACKAGES)})\n"
                    f"  if {package} is yours: allow=[{package}], or --config-dir its folder"
                )
            named[package] = None
        return tuple(named)

    def _holds(self, source: Path) -> bool:
        """Whether a module or package lies directly in her folder (not in an environment there)."""
        home = source.parent if source.name == "__init__.py" else source
        return self.folder is not None and home.resolve().parent == self.folder.resolve()


def allowed_by(overrides: Sequence[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The packages of `allow=[…]`, which no file may set."""
    allow = config.get("allow") or []
    if allow and not any(o.lstrip("+").startswith("allow=") for o in overrides):
        raise UserError("allow: given by a file; packages are allowed on the command line only")
    return tuple(map(str, allow)) if not isinstance(allow, str) else (allow,)


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every `_target_` of a configuration, with its key path."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            below = f"{key}.{name}" if key else str(name)
            if name == "_target_" and isinstance(value, str):
                yield below, value
            else:
                yield from targets(value, below)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{key}.{index}")
