"""The folder of a sweep: sweep.json lists its trials, and each trial's folder shows its state.

Any process may call `read_sweep`. Only the process that runs the trials, under `held`, writes.
This module needs neither torch nor Hydra.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, key_of, permission, setting
from attnkit.launch.processes.locks import holder, is_locked, locked
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import write_text
from attnkit.lightning.study import PRUNED

FILE = "sweep.json"
ERROR = "error.txt"
OUTPUT = "output.log"
"""File of the output of a trial that ran in a process of its own."""
VERSION = 1
State = Literal["done", "failed", "pruned", "running", "interrupted", "waiting"]

_NAMING = re.compile(r"[\w.+-]{1,30}")  # values short and plain enough for a folder name
_LONGEST = 150  # characters in a folder's name
_PLAIN = 6  # numbers of up to so many characters are not shortened
_MOST_DIGITS = 17  # digits that a float can need
# Keys of sweep.json in addition to the trials.
_FACTS = ("sweeper", "command", "keys", "hydra", "config_dir", "allow", "working_dir")
# Overrides that a trial must not have: its place, and what only a command line may permit.
_FOREIGN = ("allow", "resume", "run_dir", "sweep")


@dataclass(frozen=True)
class Trial:
    """One trial and its state when it was read."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    values: dict[str, str]
    """The values of the swept keys."""
    state: State = "waiting"
    results: dict[str, float] = field(default_factory=dict)
    """The results of a finished trial."""
    error: str = ""
    """The error of a failed trial, or why it was pruned."""

    def now(self) -> "Trial":
        """Return the trial with its current state."""
        state: State = "running" if is_locked(self.lock) else progress(self.folder)
        results = folders.load_results(self.folder) if state == "done" else {}
        file = {"failed": ERROR, "pruned": PRUNED}.get(state)
        error = (self.folder / file).read_text("utf-8").strip() if file else ""
        return replace(self, state=state, results=results, error=error)

    @property
    def lock(self) -> Path:
        """The lock of the process that runs the trial."""
        return self.folder / folders.LOCK

    @property
    def errors(self) -> list[Path]:
        """The error files of earlier attempts."""
        return sorted(self.folder.glob("error_*.txt"))


@dataclass(frozen=True)
class Sweep:
    """The content of sweep.json, and the states of the trials.

    `allow` and `config_dir` are only recorded; permission must be given on the command line.
    """

    folder: Path
    command: tuple[str, ...]
    """The overrides as they were typed."""
    keys: tuple[str, ...]
    """The keys that differ between trials."""
    trials: tuple[Trial, ...] = ()
    sweeper: str = "basic"
    hydra: tuple[str, ...] = ()
    """Hydra's own overrides among them: the launcher and its settings."""
    config_dir: str | None = None
    allow: tuple[str, ...] = ()
    """The override that allowed packages, if there was one."""
    working_dir: str = ""
    """The folder in which relative paths of the overrides start."""

    @property
    def permission(self) -> tuple[str, ...]:
        """The words of a command line that give the permissions the sweep was started with."""
        return permission(self.config_dir, self.allow)

    def having(self, *states: State) -> list[Trial]:
        """Return the trials in one of these states."""
        return [trial for trial in self.trials if trial.state in states]


def to_go_on(sweep: Sweep) -> str:
    """Return the command that continues a sweep."""
    own = r"hydra(/launcher|\.launcher|\.sweeper\.storage)"
    words = [word for word in sweep.hydra if re.match(own, word)]
    resume = setting("resume", sweep.folder)
    return command_line("-m", resume, *words, permission=sweep.permission)


def progress(folder: Path) -> State:
    """Return the state of a trial by its files, whether or not a process runs it."""
    if (folder / ERROR).is_file():
        return "failed"
    if folders.is_finished(folder):
        return "done"
    if (folder / PRUNED).is_file():
        return "pruned"
    begun = folder.is_dir() and any(p.name not in (folders.LOCK, OUTPUT) for p in folder.iterdir())
    return "interrupted" if begun else "waiting"


def read_sweep(folder: Path) -> Sweep:
    """Read the sweep in a folder, with the states of its trials.

    Raises:
        UserError: the folder has no readable sweep.json.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
        version = content["version"]
        raise UserError(f"{path}: has version {version!r}, this attnkit reads version {VERSION}")
    if problem := _problem(content):
        raise UserError(f"{path}: not the record of a sweep: {problem}")
    facts: dict[str, Any] = {
        n: tuple(v) if isinstance(v := content[n], list) else v for n in _FACTS
    }
    trials = [
        new_trial(folder, facts["keys"], number, record["overrides"], record["folder"]).now()
        for number, record in enumerate(content["trials"])
    ]
    return Sweep(folder, trials=tuple(trials), **facts)


@contextmanager
def held(folder: Path, key: str = "run_dir") -> Iterator[None]:
    """Hold the lock of a sweep, so that no other command runs its trials.

    Args:
        folder: the folder of the sweep.
        key: the setting that named the folder, for the message.

    Raises:
        UserError: another command holds the lock.
    """
    lock = folder / ".sweep.lock"
    with locked(lock) as mine:
        if not mine:
            raise UserError(f"{key}: {folder} is in use by {holder(lock)}")
        yield


def write_sweep(sweep: Sweep) -> None:
    """Write the record of a new sweep.

    Raises:
        UserError: another command has begun a sweep in this folder.
    """
    if (sweep.folder / FILE).exists():
        raise UserError(f"run_dir: {sweep.folder}: another sweep has just begun there")
    _save(sweep)


def _save(sweep: Sweep) -> None:
    """Write sweep.json, whole or not at all."""
    content = {"version": VERSION, **{name: getattr(sweep, name) for name in _FACTS}}
    content["trials"] = [
        {"number": t.number, "folder": t.folder.name, "overrides": t.overrides}
        for t in sweep.trials
    ]
    write_text(sweep.folder / FILE, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n")


def new_trial(
    folder: Path,
    keys: Sequence[str],
    number: int,
    overrides: Sequence[str],
    name: str | None = None,
) -> Trial:
    """Return a trial of a sweep, without creating its folder or recording it.

    Args:
        folder: the folder of the sweep.
        keys: the swept keys.
        number: the number of the trial.
        overrides: the overrides of the trial.
        name: the name of its folder; by default its number, followed by short values.
    """
    given = {key_of(o): o.partition("=")[2] for o in overrides}
    values = {key: given[key] for key in keys if key in given}
    if name is None:
        # the number makes the name unique, so that long decimals can be shortened
        named = [
            f"{k.replace('/', '.')}={shortened([v])[v]}"
            for k, v in values.items()
            if _NAMING.fullmatch(v)
        ]
        name = "_".join([str(number), ",".join(named)]).rstrip("_")
        name = name if len(name) <= _LONGEST else str(number)
    return Trial(number, folder / name, tuple(overrides), values)


def add_trial(folder: Path, overrides: Sequence[str], name: str | None = None) -> Trial:
    """Append a trial to a sweep whose trials are chosen one by one."""
    sweep = read_sweep(folder)
    trial = new_trial(folder, sweep.keys, len(sweep.trials), overrides, name)
    _save(replace(sweep, trials=(*sweep.trials, trial)))
    return trial


def change_trials(folder: Path, numbers: Sequence[int], changes: Sequence[str]) -> None:
    """Append overrides to these trials."""
    sweep = read_sweep(folder)
    changed = (
        replace(t, overrides=(*t.overrides, *changes)) if t.number in numbers else t
        for t in sweep.trials
    )
    _save(replace(sweep, trials=tuple(changed)))


def find_sweep(given: object, key: str) -> Path:
    """Return the folder of the sweep that `key=given` names; `latest` is the newest in outputs/."""
    if given is None:
        raise UserError(f"{key}: missing; give {key}=PATH, the folder of a sweep, or {key}=latest")
    folder = folders.find(given, key, "sweep", [f"*/*/{FILE}"])
    if not (folder / FILE).is_file():
        one = f"; one run: {command_line(setting('resume', folder))}"
        hint = one if key == "resume" and (folder / folders.CONFIG).is_file() else ""
        if key == "sweep":
            hint = "\n  give the folder that attnkit -m created, or sweep=latest for the newest"
        raise UserError(f"{key}: no sweep in {folder} (it has no {FILE}){hint}")
    return folder


def shortened(texts: Iterable[str]) -> dict[str, str]:
    """Return for each value of a key its text for display.

    Long decimal numbers have three significant digits, or more if two values would become equal;
    other values are unchanged.
    """
    texts = list(dict.fromkeys(texts))
    for digits in range(3, _MOST_DIGITS):
        shown = {text: _rounded(text, digits) for text in texts}
        if len(set(shown.values())) == len(texts):
            return shown
    return {text: text for text in texts}


def _rounded(text: str, digits: int) -> str:
    try:
        value = float(text)
    except ValueError:
        return text
    whole = text.lstrip("+-").isdigit()
    if whole or len(text) <= _PLAIN or not math.isfinite(value):
        return text
    return f"{value:.{digits}g}"


def _problem(content: Any) -> str:
    """Return what is wrong with the content of a sweep.json, which may be untrusted, or nothing."""
    if not isinstance(content, dict):
        return "expected a mapping"
    for name in ("command", "keys", "hydra", "allow"):
        if not _is_texts(content.get(name)):
            return f"{name}: expected texts"
    kinds = {"config_dir": str | None, "sweeper": str, "working_dir": str, "trials": list}
    for name, kind in kinds.items():
        if name not in content or not isinstance(content[name], kind):
            return f"{name}: missing, or of a wrong type"
    for number, record in enumerate(content["trials"]):
        place = record.get("folder") if isinstance(record, dict) else None
        if not isinstance(place, str) or Path(place).name != place or place[:1] in ("", "."):
            return f"trials.{number}.folder: expected a name"
        if record.get("number") != number or not _is_texts(record.get("overrides")):
            return f"trials.{number}: expected this number and its overrides"
        for override in record["overrides"]:
            if key_of(override) in _FOREIGN or re.match(r"hydra\b", key_of(override)):
                return f"trials.{number}: {override} is not for a trial"
    return ""


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
