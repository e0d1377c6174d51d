"""Which code a configuration may name: attnkit's, its dependencies', and what the user allowed.

Only the command line gives permission, never a file: `allow=[mypackage]` for packages, and
`--config-dir FOLDER` for modules and packages that lie directly in that folder.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

from attnkit.launch.config import signatures
from attnkit.launch.config.files import Origins
from attnkit.lightning import build as allowed
from attnkit.lightning.errors import UserError


@dataclass(frozen=True)
class Consent:
    """Packages the user allowed, and the folder of the user's configurations and modules."""

    packages: tuple[str, ...] = ()
    folder: Path | None = None

    def make_importable(self) -> None:
        """Append the user's folder, and with `allow` the current one, to the module path."""
        folders = [self.folder] if self.folder else []
        folders += [Path.cwd()] if self.packages else []
        for folder in folders:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        invalidate_caches()

    def check(self, config: Mapping[str, Any], origins: Origins | None = None) -> tuple[str, ...]:
        """Return the user's packages that the configuration names; refuse code that is not allowed.

        Only names are read, and nothing is imported; `build` checks the objects that they name.
        """
        named = dict.fromkeys(self.packages)
        for key, target in targets(config):
            package = target.partition(".")[0]
            if self._holds(package):
                named[package] = None
            problem = allowed.objection(target, tuple(named))
            if problem is None or (
                package.isidentifier()
                and allowed.is_unknown(package)
                and not signatures.source_of(package)
            ):
                continue  # there is no such package; validate() has a better message for that
            raise UserError(problem, key=key, where=origins.of(key) if origins else "")
        return tuple(named)

    def _holds(self, package: str) -> bool:
        """Return whether a package lies in the user's folder itself, not in an environment."""
        if self.folder is None or not allowed.is_unknown(package):
            return False
        source = signatures.source_of(package)
        if source is None:
            return False
        home = source.parent if source.name == "__init__.py" else source
        return home.resolve().parent == self.folder.resolve()


def allowed_by(overrides: Sequence[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the packages of `allow=[…]`, which only the command line may set."""
    allow = config.get("allow") or []
    if allow and not any(o.lstrip("+").startswith("allow=") for o in overrides):
        raise UserError("allow: set in a file; packages can be allowed only on the command line")
    packages = tuple(map(str, allow)) if not isinstance(allow, str) else (allow,)
    for package in packages:
        if not package.isidentifier() or not allowed.is_unknown(package):
            raise UserError(f"allow: expected packages of your own, got {package!r}")
    return packages


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key path and the value of every `_target_` in a configuration."""
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
