"""Commands as texts: what a message prints to be pasted into a POSIX shell, and their overrides."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path


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
    if re.fullmatch(r"[\w./+-]+", text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def key_of(override: str) -> str:
    """The key or group that an override sets."""
    return override.partition("=")[0].lstrip("+~")
