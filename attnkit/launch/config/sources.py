"""Where a key of the composed configuration was written: the command line, or file and line."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from attnkit.launch.command import dotted_key


@dataclass(frozen=True)
class Source:
    """One YAML file that was composed, and the key path its content went to."""

    path: Path
    package: str


@dataclass(frozen=True)
class Origins:
    """What a configuration was composed from.

    Args:
        overrides: of the command line.
        find_files: the files in the order they were merged; called once there is a message.
    """

    overrides: Sequence[str] = ()
    find_files: Callable[[], Sequence[Source]] = tuple

    def of(self, key: str) -> str:
        """`model.depth=abc` as typed, or `path/to/file.yaml:12`; empty where neither has it."""
        return self.typed(key) or self.written(key)

    def typed(self, key: str) -> str:
        for override in reversed(self.overrides):
            name = dotted_key(override)
            if name == key or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                return override
        return ""

    def written(self, key: str) -> str:
        for source in reversed(self.find_files()):
            prefix = f"{source.package}." if source.package else ""
            if key.startswith(prefix):
                line = line_of(source.path, key[len(prefix) :].split("."))
                if line:
                    return f"{short(source.path)}:{line}"
        return ""


def line_of(path: Path, keys: Iterable[str]) -> int | None:
    """The line on which a key path stands in a YAML file."""
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
    """Relative to the current folder where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
