"""Commands as texts, to be pasted into a POSIX shell, and their overrides."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOUBLE = '"'
QUESTION_MARKS = "attnkit.question_marks"
"""The resolver of OmegaConf that gives `???`."""


def command_line(*words: str, permission: Sequence[str] = ()) -> str:
    """`attnkit WORDS`, each word quoted for the shell.

    Args:
        permission: what the function `permission` gives, without which it would be refused.
    """
    return shlex.join(["attnkit", *words, *permission])


def permission(config_dir: str | Path | None, allow: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line that permit code: `--config-dir` and the overrides `allow=`."""
    return (*(("--config-dir", str(config_dir)) if config_dir else ()), *allow)


def setting(key: str, path: Path) -> str:
    """`key=path`, quoted where Hydra needs it. The shell's quotes are not in it."""
    text = str(path)
    plain = re.fullmatch(r"[\w./+-]+", text, re.ASCII)
    return f"{key}={text if plain else quoted(text, DOUBLE)}"


def quoted(text: str, mark: str = "'") -> str:
    """A text as Hydra's overrides quote it, whatever is in it.

    There a backslash escapes only the quotation mark, and itself before one.
    """
    escaped = re.sub(
        rf"(\\*)({mark}|\Z)", lambda m: 2 * m[1] + (m[2] and f"\\{mark}"), literal(text)
    )
    return f"{mark}{escaped}{mark}"


def literal(value: Any) -> Any:
    """A value that OmegaConf takes as it stands: `${…}` in its texts means nothing, nor does `???`.

    For what comes from files and folders. `compose.py` has the resolver.
    """
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if value == "???":
        return f"${{{QUESTION_MARKS}:}}"
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def key_of(override: str) -> str:
    """The key or group that an override sets."""
    return override.partition("=")[0].lstrip("+~")


def dotted_key(override: str) -> str:
    """The same with dots, without the package of a group."""
    return key_of(override).partition("@")[0].replace("/", ".")
