"""Commands as texts, to be pasted into a POSIX shell; their overrides; what may have been meant."""

import re
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
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


def dotted_key(override: str) -> str:
    """The same with dots, without the package of a group."""
    return key_of(override).partition("@")[0].replace("/", ".")


def nearest(name: object, names: Iterable[str]) -> str:
    """`; did you mean …?` with the most similar of some names, or nothing."""
    close = get_close_matches(str(name), list(names), n=1, cutoff=0.55)
    return f"; did you mean {close[0]}?" if close else ""
