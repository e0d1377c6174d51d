"""Run folders: how they are named, created, found, read and written.

This is the only module that writes config.yaml, state.json, results.json and origin.json.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from attnkit.launch.command import setting
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import absolute, refuse_url, write_text
from attnkit.lightning.versions import versions

if TYPE_CHECKING:
    from lightning import Trainer


OUTPUTS = "outputs"
CONFIG = "config.yaml"
RESULTS = "results.json"
STATE = "state.json"
ORIGIN = "origin.json"
CHECKPOINTS = "checkpoints"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in a Hugging Face folder
LOCK = ".lock"  # locked by the process that runs in the folder
RUNNING, STOPPED, FAILED, DONE = "running", "stopped", "failed", "done"

# Files that make a run folder worth keeping if the run ends early.
KEPT = ("*.ckpt", "metrics.csv", RESULTS, "predictions.csv")


def plan(given: object, task: str, *, sweep: bool = False) -> Path:
    """Return the folder of a run, given or new, without creating it; refuse one with content."""
    if given is None:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        name = f"sweep_{stamp}" if sweep else stamp
        return _free(Path.cwd() / OUTPUTS / task / name)
    refuse_url(str(given), "run_dir")
    if not str(given).strip():
        raise UserError("run_dir=: expected a folder")
    path = absolute(str(given))
    check_writable(path, "run_dir")
    if not is_empty(path):
        hint = f"; to go on in it: {as_override('resume', path)}" if _trains(path) else ""
        raise UserError(f"run_dir: {path} is not empty{hint}")
    return path


def check_writable(path: Path, key: str) -> None:
    """Refuse a path that is no folder and can't become one."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{key}: {path} is a file")
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{key}: {nearest} can't be written to")


def _trains(folder: Path) -> bool:
    path = folder / CONFIG
    return path.is_file() and "\nrun: train\n" in path.read_text(encoding="utf-8", errors="replace")


def as_override(key: str, path: Path) -> str:
    """Return `key=path` for a shell, quoted where the shell or Hydra needs it."""
    return shlex.quote(setting(key, path))


def create(path: Path, *, fresh: bool) -> Path:
    """Create and return the folder; with `fresh`, use the next free name if this one is taken."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=not fresh)
            return path
        except FileExistsError:
            if not fresh:
                raise UserError(f"{path}: expected a folder, this is a file") from None
            path = _free(path)
        except OSError as error:
            raise UserError(f"{path}: can't be made: {error.strerror}") from error


def _free(path: Path) -> Path:
    number = 2
    free = path
    while free.exists():
        free = path.with_name(f"{path.name}_{number}")
        number += 1
    return free


def absent(path: Path) -> list[Path]:
    """Return the folders that do not exist yet, from this one upward."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def is_empty(folder: Path) -> bool:
    """Return whether the folder is missing, empty or holds only a lock."""
    return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())


def is_bare(folder: Path) -> bool:
    """Return whether the folder holds only the configuration, the state and logs."""
    files = (path.name for path in folder.rglob("*") if path.is_file())
    return all(name in (CONFIG, LOCK, ORIGIN, STATE) or name.endswith(".log") for name in files)


def take_back(folder: Path, made: list[Path]) -> None:
    """Empty the folder of a refused command, and remove the folders that were created for it.

    Nothing is removed if the folder holds a file worth keeping.
    """
    if any(next(folder.rglob(name), None) for name in KEPT):
        return
    if folder.is_dir():
        for inside in folder.iterdir():
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside, ignore_errors=True)
            else:
                inside.unlink(missing_ok=True)
    if made:
        made = [folder, *made[1:]]  # the folder may have got another name
    for path in made:
        with suppress(OSError):  # not empty: another run is in there
            path.rmdir()


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes a list of plain values on one line."""


def _on_one_line(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    is_plain = not any(isinstance(value, dict | list | tuple) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_plain)


_Dumper.add_representer(list, _on_one_line)
_Dumper.add_representer(tuple, _on_one_line)


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.yaml, whole or not at all."""
    # a vocabulary of ten thousand words on one line does not hide the rest
    text = yaml.dump(
        dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf
    )
    write_text(folder / CONFIG, f"# Written by attnkit; every value the run used.\n{text}")


def load_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run folder; its paths are adapted if the folder was moved."""
    config = read_config(folder / CONFIG)
    return relocate(config, Path(str(config.get("run_dir") or folder)), folder)


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.yaml as it was written.

    Raises:
        UserError: the file can't be read, or is not the configuration of a run.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {first_line(error)}") from error
    if not isinstance(config, dict) or "task" not in config:
        raise UserError(f"{path}: not the configuration of a run")
    return config


def relocate(value: Any, old: Path, new: Path) -> Any:
    """Return the same values with every path below `old` moved below `new`."""
    if isinstance(value, dict):
        return {k: relocate(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [relocate(v, old, new) for v in value]
    if isinstance(value, str) and (value == str(old) or value.startswith(f"{old}{os.sep}")):
        return str(new) + value[len(str(old)) :]
    return value


def load_results(folder: Path) -> dict[str, float]:
    """Return the content of results.json, or an empty dict."""
    return load_json(folder / RESULTS)


def save_results(folder: Path, results: Mapping[str, float]) -> None:
    """Write results.json, whole or not at all."""
    save_json(folder / RESULTS, dict(sorted(results.items())))


def load_state(folder: Path) -> dict[str, Any]:
    """Return state.json: `state`, and for a finished run also `ended_by`, `epochs` and `steps`."""
    return load_json(folder / STATE)


def save_state(folder: Path, state: str, **facts: Any) -> None:
    """Write state.json, whole or not at all."""
    save_json(folder / STATE, {"state": state, **facts})


def is_finished(folder: Path) -> bool:
    """Return whether a run is done and has written its results."""
    return load_state(folder).get("state") == DONE and (folder / RESULTS).is_file()


def load_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file, or an empty dict if there is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, f"{json.dumps(content, indent=2, allow_nan=False)}\n")


def find(
    given: object,
    key: str,
    what: str,
    patterns: Sequence[str],
    wanted: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """Return the folder that `key=given` names; `latest` is the newest match below outputs/.

    Args:
        given: a path or `latest`.
        key: name of the setting, for messages.
        what: what is searched for, for messages.
        patterns: glob patterns, relative to outputs/, of a file directly in the folder.
        wanted: whether a matching folder counts.
    """
    if given == "latest":
        outputs = Path.cwd() / OUTPUTS
        files = [p for pattern in patterns for p in outputs.glob(pattern) if wanted(p.parent)]
        if not files:
            raise UserError(f"{key}=latest: no {what} under {outputs}")
        return max(files, key=lambda path: path.stat().st_mtime).parent
    refuse_url(given, key)
    folder = absolute(str(given))
    if not folder.is_dir():
        raise UserError(f"{key}: no folder {folder}")
    return folder


def to_resume(given: str) -> Path:
    """Return the run folder that `resume=` names."""
    patterns = (f"*/*/{CONFIG}", f"*/sweep_*/*/{CONFIG}")
    folder = find(given, "resume", "run", patterns, _trains)
    if not (folder / CONFIG).is_file():
        hint = f"; a sweep: -m {as_override('resume', folder)}" if _is_sweep(folder) else ""
        raise UserError(f"resume: no run in {folder} (it has no {CONFIG}){hint}")
    return folder


def _is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").is_file()


def initial(given: str) -> str:
    """Return what `init=` names: a model on a hub, a folder of weights or a checkpoint."""
    if given.startswith("hf-hub:"):
        return given
    if any((absolute(given) / name).is_file() for name in WEIGHTS):
        return str(absolute(given))
    return str(checkpoint(given, "init"))


def checkpoint(given: str, key: str = "ckpt") -> Path:
    """Return the file that `ckpt=` names; for a run folder, its best checkpoint."""
    refuse_url(given, key)
    path = absolute(given)
    if path.is_dir():
        inside = path / CHECKPOINTS / "best.ckpt"
        if not inside.is_file():
            hint = "; a sweep: give the folder of one of its trials" if _is_sweep(path) else ""
            raise UserError(f"{key}: no {CHECKPOINTS}/best.ckpt in {path}{hint}")
        return inside
    if not path.is_file():
        raise UserError(f"{key}: no file {path}")
    return path


def run_of(ckpt: Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, or None."""
    folder = ckpt.parent.parent
    return folder if ckpt.parent.name == CHECKPOINTS and (folder / CONFIG).is_file() else None


# --- origin.json ----------------------------------------------------------------------------------


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
    content = origin(folder)
    keys = sorted({*content.get("from_data", []), *from_data})
    save_json(folder / ORIGIN, {"from_data": keys, "starts": [*content.get("starts", []), entry]})


def ended(folder: Path, state: str) -> None:
    """Record when and how the last start ended, if there was one."""
    content = origin(folder)
    if starts := content.get("starts"):
        starts[-1] |= {"ended": _now(), "state": state}
        save_json(folder / ORIGIN, content)


def origin(folder: Path) -> dict[str, Any]:
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
