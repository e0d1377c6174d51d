"""origin.json: where a run comes from, with an entry for each start.

config.yaml says what is run. An entry says by which command, on which machine, with which versions
and when, and gives the date of the ledger by which kernels were chosen, if there was one.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.launch.folder import ORIGIN, load_json, save_json
from attnkit.lightning.versions import versions

if TYPE_CHECKING:
    from lightning import Trainer

_SLOW = 10.0  # seconds that git may take in a large repository


def started(folder: Path, command: str, trainer: Trainer, from_data: list[str]) -> None:
    """Add an entry for a run that starts now.

    Args:
        folder: the run folder.
        command: the command as it was typed.
        trainer: the trainer, for its devices.
        from_data: keys of the configuration whose values came from the data.
    """
    entry = {
        "command": command,
        "folder": os.getcwd(),
        "started": _now(),
        "ended": None,
        "state": "running",
        "host": platform.node(),
        "system": platform.platform(),
        "devices": _devices(trainer),
        "python": platform.python_version(),
        "packages": versions() | {"torch": str(sys.modules["torch"].__version__)},
        "git": git_state(Path.cwd()),
        "attnkit_git": git_state(Path(__file__).parent),
    }
    content = load(folder)
    keys = sorted({*content.get("from_data", []), *from_data})
    save_json(folder / ORIGIN, {"from_data": keys, "starts": [*content.get("starts", []), entry]})


def ended(folder: Path, state: str) -> None:
    """Record when and how the last start ended, if there was one."""
    content = load(folder)
    if starts := content.get("starts"):
        starts[-1] |= {"ended": _now(), "state": state}
        save_json(folder / ORIGIN, content)


def load(folder: Path) -> dict[str, Any]:
    """Return the content of origin.json, or an empty dict."""
    return load_json(folder / ORIGIN)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the revision of the repository around a folder, and whether tracked files differ.

    The result is None if that is unknown. The repository may be untrusted (unpacked from an
    archive), and its configuration may name programs that `git status` runs: `core.fsmonitor`, file
    filters, helpers that fetch missing objects. None of them is run here, nor in submodules. A file
    that a filter changes (LFS) therefore counts as different once it was written to.
    """
    revision = _git(folder, "rev-parse", "HEAD")
    if not revision:
        return None
    keys = _git(folder, "config", "--list", "--name-only", "-z")
    filters = [key for key in (keys or "").split("\0") if key.startswith("filter.")]
    if keys is None or any("=" in key for key in filters):  # -c would set another key
        return {"revision": revision, "dirty": None}
    off = [word for key in filters for word in ("-c", f"{key}=")]
    options = ("--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    changes = _git(folder, *off, "status", *options)
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=", "-C", folder, *words],
            env={**os.environ, "GIT_ALLOW_PROTOCOL": "none"}, errors="surrogateescape",
            encoding="utf-8", capture_output=True, timeout=_SLOW, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _devices(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    facts = {"kind": device.type, "processes": trainer.world_size, "cpus": os.cpu_count()}
    if device.type == "cuda":
        torch = sys.modules["torch"]
        facts |= {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    from attnkit.core.kernels import ledger  # imports torch, which this module does not

    return facts | {"ledger": ledger.known_of(device).date}


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
