"""Where a run comes from: origin.json, with an entry for each time that it was started.

Beside config.yaml, which says what is run, it says by which command, on which machine, in which
versions, when, and of which date the ledger was that kernels were chosen by, if there was one.
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
        folder: of the run.
        command: as it was typed.
        trainer: whose devices it uses.
        from_data: keys of the configuration whose values the data gave.
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
    found = sorted({*content.get("from_data", []), *from_data})
    save_json(folder / ORIGIN, {"from_data": found, "starts": [*content.get("starts", []), entry]})


def ended(folder: Path, state: str) -> None:
    """Note when and how the last start ended; nothing where there was none."""
    content = load(folder)
    if starts := content.get("starts"):
        starts[-1] |= {"ended": _now(), "state": state}
        save_json(folder / ORIGIN, content)


def load(folder: Path) -> dict[str, Any]:
    """origin.json, or nothing."""
    return load_json(folder / ORIGIN)


def git_state(folder: Path) -> dict[str, Any] | None:
    """The revision of the repository around a folder, and whether tracked files differ from it.

    None where that can't be told. The repository may be a stranger's, unpacked from an archive, and
    its configuration names programs that `git status` runs: `core.fsmonitor`, filters of files,
    what fetches missing objects. None of them is run here, in submodules neither, so that a file
    which a filter changes (LFS) differs once it was written to.
    """
    revision = _git(folder, "rev-parse", "HEAD")
    if not revision:
        return None
    keys = _git(folder, "config", "--list", "--name-only", "-z")
    filters = [key for key in (keys or "").split("\0") if key.startswith("filter.")]
    if keys is None or any("=" in key for key in filters):  # -c would take it for another key
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
    found = {"kind": device.type, "processes": trainer.world_size, "cpus": os.cpu_count()}
    if device.type == "cuda":
        torch = sys.modules["torch"]
        found |= {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    from attnkit.core.kernels import ledger  # which needs torch, as what is above does not

    return found | {"ledger": ledger.known_of(device).date}


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
