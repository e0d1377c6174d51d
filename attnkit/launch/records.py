"""Records: results that experiments in conf/experiment reproduce, and when two figures agree.

A record is the node `record` of an experiment. The rest of the experiment is its command; if
`record.script` names a file, that file is run instead.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attnkit.launch.command import setting
from attnkit.launch.config.files import Origins, Source, short
from attnkit.launch.config.signatures import Signature, known
from attnkit.launch.config.validate import check_arguments
from attnkit.lightning.errors import UserError

GROUP = "experiment"
_PLACES = ("", "raw", "*/raw")  # folders below data.root in which the data modules look for files


@dataclass(frozen=True)
class Figure:
    """A mean over runs, in the unit of its record. Its text is `83.05 ± 0.37`.

    Args:
        mean: the mean as written; its last digit shows its precision.
        std: standard deviation over the runs; None if unknown, or for one run.
        runs: number of runs; None if unknown.
        tolerance: difference up to which another figure agrees, whatever the deviations; None:
            half a unit of the last digit of the mean.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    tolerance: float | None = None

    def __str__(self) -> str:
        numbers = [self.mean] if self.std is None else [self.mean, self.std]
        if 0 < abs(self.mean) < 1e-3:
            return " ± ".join(f"{number:.0e}" for number in numbers)
        places = max(map(_places, numbers))
        return " ± ".join(f"{number:.{places}f}" for number in numbers)


def verdict(new: Figure, reference: Figure) -> str:
    """Return `within spread`, `above` or `below`: where the new figure lies from the reference.

    It is within the spread if |new − reference| ≤ max(√(s² + s_ref²), tolerance), where s are the
    standard deviations over runs, or 0 if unknown.
    """
    spread = math.hypot(new.std or 0.0, reference.std or 0.0)
    tolerance = reference.tolerance
    if tolerance is None:
        tolerance = 0.5 * 10.0 ** -_places(reference.mean)
    difference = new.mean - reference.mean
    if abs(difference) <= max(spread, tolerance) * (1 + 1e-9):
        return "within spread"
    return "above" if difference > 0 else "below"


def _places(number: float) -> int:
    """Return the number of decimals of a number as it was written."""
    text = repr(number)
    return 0 if "e" in text else len(text.partition(".")[2])


@dataclass(frozen=True)
class Data:
    """The files that a record needs: the name of their folder, and a file by which it is found."""

    folder: str
    file: str

    def root(self, given: Path) -> Path:
        """Return the folder for `data.root`: the given one, or that of this name inside it."""
        inside = given / self.folder
        return inside if inside.is_dir() else given

    def is_in(self, given: Path) -> bool:
        """Return whether the files are in the given folder."""
        root = self.root(given)
        return any(next(root.glob(str(Path(p, self.file))), None) for p in _PLACES)


_PARTS: dict[str, type] = {"published": Figure, "ours": Figure, "data": Data}
"""Keys of a record that are objects of their own."""


@dataclass(frozen=True)
class Record:
    """One published or own result. docs/records.md explains the keys of the node `record`.

    Args:
        name: the name of the experiment.
        runs: number of its runs, each with its own seed or split.
        by: "seeds" or "splits".
        conf: the folder that the experiment was read from.
    """

    name: str
    runs: int
    by: str
    conf: Path
    # The keys of the node.
    what: str
    metric: str  # its name in results.json
    paper: str  # for a result of our own, the page that states it
    table: str
    url: str = ""
    unit: str = "%"  # "": the unit of results.json
    published: Figure | None = None
    ours: Figure | None = None
    date: str = ""
    machine: str = ""
    minutes: float | None = None  # all runs together
    data: Data | None = None
    gpu: bool = False
    script: str = ""
    why: str = ""
    note: str = ""

    @property
    def time(self) -> str:
        """The time of all runs as text: `39 s`, `57 min`."""
        if self.minutes is None:
            return ""
        return f"{60 * self.minutes:.0f} s" if self.minutes < 1.5 else f"{self.minutes:.0f} min"

    def overrides(self, root: Path | None, runs: int | None = None) -> list[str]:
        """Return the overrides that run the experiment.

        Args:
            root: the folder given for `data.root`.
            runs: number of runs, if it differs from the record.
        """
        words = [f"{GROUP}={self.name}"]
        if self.data is not None and root is not None:
            words.append(setting("data.root", self.data.root(root)))
        return [*words, *([f"{self.by}={runs}"] if runs else [])]


def grouped(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records by paper and table, papers with a URL first."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: (not r.url, r.paper, r.table, r.name)):
        groups.setdefault(f"{record.paper}, {record.table}", []).append(record)
    return groups


def read(folders: Sequence[Path]) -> dict[str, Record]:
    """Return all records by name; those of a later folder replace records of the same name.

    Args:
        folders: folders of configuration groups, such as conf/.

    Raises:
        UserError: a record is incomplete; the message names file and key.
    """
    records = {}
    for folder in folders:
        for path in sorted((folder / GROUP).glob("*.yaml")):
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise UserError(f"{short(path)}: not valid YAML: {error!s:.80}") from error
            if isinstance(content, dict) and content.get("record") is not None:
                records[path.stem] = _record(path, content)
    return records


def _record(path: Path, content: Mapping[str, Any]) -> Record:
    where = Origins(find_files=lambda: [Source(path, "")])
    given = _mapping("record", content["record"], where)
    parts: dict[str, Any] = {}
    for key, kind in _PARTS.items():
        if key in given:
            part = _mapping(f"record.{key}", given.pop(key), where)
            _check(f"record.{key}", part, known(f"{__name__}.{kind.__name__}"), where)
            parts[key] = kind(**part)
    by = "splits" if content.get("splits") else "seeds"
    runs = content.get(by) or 1
    if runs == "all":
        runs = (content.get("data") or {}).get("num_splits")
    if not isinstance(runs, int):
        raise _problem(by, "expected a number, or all together with data.num_splits", where)
    own: dict[str, Any] = {"name": path.stem, "runs": runs, "by": by, "conf": path.parents[1]}
    keys = known(f"{__name__}.{Record.__name__}").parameters
    _check("record", given, Signature({k: p for k, p in keys.items() if k not in own}), where)
    record = Record(**own, **given, **parts)
    if record.ours is None and not record.why:
        raise _problem("record.why", "missing; say why nothing was measured", where)
    if record.ours is not None and not (record.date and record.machine):
        raise _problem("record.ours", "a measured figure needs its date and machine", where)
    return record


def _mapping(key: str, given: Any, where: Origins) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _problem(key, f"expected a mapping, got {given!r}", where)
    return {str(name): value for name, value in given.items() if value is not None}


def _check(key: str, given: dict[str, Any], signature: Signature, where: Origins) -> None:
    """Check that each key exists and has its type, and that none is missing."""
    check_arguments(key, given, signature, where, what=key)
    for name, parameter in signature.parameters.items():
        if parameter.required and name not in given:
            raise _problem(f"{key}.{name}", "missing", where)


def _problem(key: str, message: str, where: Origins) -> UserError:
    """Return an error with the file and the line of the key, or of the node that lacks it."""
    place = where.of(key) or where.of(key.rpartition(".")[0])
    return UserError(f"{key}: {message}" + (f"\n  in {place}" if place else ""))
