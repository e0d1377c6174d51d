"""The files of configurations: their folders, the choices in them, and where a key is written.

The help needs only the choices, so that YAML is imported where a file is read.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnkit.launch.command import dotted_key
from attnkit.lightning.errors import UserError


@dataclass(frozen=True)
class Source:
    """A YAML file of a composition, and the key path below which its content was placed."""

    path: Path
    package: str


@dataclass(frozen=True)
class Origins:
    """The overrides and files that a configuration was composed from.

    Args:
        overrides: the overrides of the command line.
        find_files: returns the files in the order of merging; called only for a message.
    """

    overrides: Sequence[str] = ()
    find_files: Callable[[], Sequence[Source]] = tuple

    def of(self, key: str) -> str:
        """Return `model.depth=abc` as typed, or `path/to/file.yaml:12`, or an empty text."""
        return self.typed(key) or self.written(key)

    def typed(self, key: str) -> str:
        """Return the last override that sets the key, or a key above or below it."""
        for override in reversed(self.overrides):
            name = dotted_key(override)
            if name == key or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                return override
        return ""

    def written(self, key: str) -> str:
        """Return file and line of the last file that contains the key."""
        for source in reversed(self.find_files()):
            prefix = f"{source.package}." if source.package else ""
            if key.startswith(prefix):
                line = line_of(source.path, key[len(prefix) :].split("."))
                if line:
                    return f"{short(source.path)}:{line}"
        return ""


def line_of(path: Path, keys: Iterable[str]) -> int | None:
    """Return the line of a key path in a YAML file."""
    import yaml

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    line = None
    for key in keys:
        if isinstance(node, yaml.SequenceNode):
            index = int(key) if key.isdigit() else -1
            if not 0 <= index < len(node.value):
                return None
            node = node.value[index]
            line = node.start_mark.line + 1
            continue
        if not isinstance(node, yaml.MappingNode):
            return None
        pair = next(((k, v) for k, v in node.value if str(k.value) == key), None)
        if pair is None:
            return None
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def short(path: Path) -> str:
    """Return a path relative to the current folder if it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# --- folders and choices --------------------------------------------------------------------------


CONFIG_NAME = "config"
"""Name of the file conf/config.yaml, with which every composition begins."""


def folders(config_dir: Path | None) -> list[Path]:
    """Return attnkit's own conf/ and the user's folder.

    Raises:
        UserError: the user's folder does not exist, or would replace attnkit's configuration.
    """
    shipped = Path(__file__).resolve().parents[2] / "conf"
    if config_dir is None:
        return [shipped]
    if not config_dir.is_dir():
        raise UserError(f"--config-dir: no folder {config_dir}")
    if (config_dir / f"{CONFIG_NAME}.yaml").exists():
        raise UserError(
            f"--config-dir: {config_dir}/{CONFIG_NAME}.yaml would replace attnkit's own\n"
            "  give it another name, or put it into a folder such as task/"
        )
    return [shipped, config_dir]


def groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return each group and its choices, sorted, over all folders."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    found.pop("hydra", None)  # only the command line may set it
    return {name: sorted(found[name]) for name in sorted(found)}
