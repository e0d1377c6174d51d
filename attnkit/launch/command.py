"""Commands as text that can be pasted into a POSIX shell, and their overrides."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOUBLE = '"'
QUESTION_MARKS = "attnkit.question_marks"
"""Name of the OmegaConf resolver that returns `???`."""


def command_line(*words: str, permission: Sequence[str] = ()) -> str:
    """Return `attnkit WORDS`, each word quoted for the shell.

    Args:
        permission: result of the function `permission`, if the command needs it.
    """
    return shlex.join(["attnkit", *words, *permission])


def permission(config_dir: str | Path | None, allow: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command that permit the user's code: `--config-dir` and `allow=`."""
    return (*(("--config-dir", str(config_dir)) if config_dir else ()), *allow)


def setting(key: str, path: Path) -> str:
    """Return `key=path`, quoted for Hydra if necessary, but not for the shell."""
    text = str(path)
    plain = re.fullmatch(r"[\w./+-]+", text, re.ASCII)
    return f"{key}={text if plain else quoted(text, DOUBLE)}"


def quoted(text: str, mark: str = "'") -> str:
    """Return any text quoted in the syntax of Hydra's overrides.

    In this syntax a backslash escapes only the quotation mark, and itself before one.
    """
    escaped = re.sub(
        rf"(\\*)({mark}|\Z)", lambda m: 2 * m[1] + (m[2] and f"\\{mark}"), literal(text)
    )
    return f"{mark}{escaped}{mark}"


def literal(value: Any) -> Any:
    """Return a value escaped for OmegaConf, so that `${…}` and `???` in its texts have no meaning.

    It is used for values from files and folders. `compose.py` registers the resolver for `???`.
    """
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if value == "???":
        return f"${{{QUESTION_MARKS}:}}"
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def key_of(override: str) -> str:
    """Return the key or group that an override sets."""
    return override.partition("=")[0].lstrip("+~")


def dotted_key(override: str) -> str:
    """Return the key or group that an override sets, with dots and without a group's package."""
    return key_of(override).partition("@")[0].replace("/", ".")
