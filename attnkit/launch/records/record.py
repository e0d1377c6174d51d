"""The records in conf/experiment: of each figure what it reproduces, and what came of it.

A record is the node `record` of an experiment. The experiment is its command; where `record.script`
names a file, that is run instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from attnkit.core.nearest import nearest
from attnkit.launch.command import command_line, setting
from attnkit.launch.config.annotations import accepts, expected
from attnkit.launch.config.signatures import known
from attnkit.launch.config.sources import short
from attnkit.launch.records.verdict import Figure
from attnkit.lightning.errors import UserError

GROUP = "experiment"
_PLACES = ("", "raw", "*/raw")  # of a data set's files below data.root, as the data modules look


@dataclass(frozen=True)
class Data:
    """The files that a record needs.

    Args:
        folder: the name of their folder, where `data.root` holds several.
        file: one of them, by which they are found.
    """

    folder: str
    file: str

    def root(self, given: Path) -> Path:
        """The folder for `data.root`: the one of this name in what was given, or that itself."""
        inside = given / self.folder
        return inside if inside.is_dir() else given

    def is_in(self, given: Path) -> bool:
        """Whether the files are there."""
        root = self.root(given)
        return any(next(root.glob(str(Path(p, self.file))), None) for p in _PLACES)


@dataclass(frozen=True)
class Record:
    """One figure.

    Args:
        name: of the experiment.
        what: what is measured, in a line.
        metric: its name in results.json.
        runs: how many there are of it, each of a seed or a split.
        paper: authors and year; of a figure of our own, where it is claimed.
        table: which table, figure or section of it.
        url: of the paper.
        unit: "%" where results.json has a share, else "".
        published: the figure of the paper.
        ours: what was measured by the command, last.
        date: of `ours`, as 2026-11-23.
        machine: of `ours`.
        minutes: of `ours` on it, all seeds.
        data: the files that it needs.
        gpu: whether it takes too long without one.
        script: a file to run instead, below the folder that holds conf/.
        why: why `ours` is missing.
        note: what differs from the paper.
        by: "seeds" or "splits".
        conf: the folder that the experiment was read from.
    """

    name: str
    what: str
    metric: str
    runs: int
    paper: str
    table: str
    url: str = ""
    unit: str = "%"
    published: Figure | None = None
    ours: Figure | None = None
    date: str = ""
    machine: str = ""
    minutes: float | None = None
    data: Data | None = None
    gpu: bool = False
    script: str = ""
    why: str = ""
    note: str = ""
    by: str = "seeds"
    conf: Path = Path()

    @property
    def group(self) -> str:
        """The heading that it stands under."""
        return f"{self.paper}, {self.table}"

    @property
    def needs(self) -> str:
        """`data`, `GPU`, `data, GPU`, or nothing."""
        return ", ".join(name for name, is_so in (("data", self.data), ("GPU", self.gpu)) if is_so)

    @property
    def reference(self) -> Figure | None:
        """What a new figure is held against: the published one, else ours."""
        return self.published or self.ours

    @property
    def path(self) -> Path:
        """The path of its script.

        Raises:
            UserError: it is not here.
        """
        path = self.conf.resolve().parent / self.script
        if not path.is_file():
            raise UserError(
                f"{self.name}: no file {path}\n"
                f"  {self.script} is in the repository, which an installed package does not have"
            )
        return path

    def overrides(self, root: Path | None, runs: int | None = None) -> list[str]:
        """The command line that runs the experiment.

        Args:
            root: what was given for `data.root`.
            runs: another number than on record.
        """
        words = [f"{GROUP}={self.name}"]
        if self.data is not None and root is not None:
            words.append(setting("data.root", self.data.root(root)))
        return [*words, *([f"{self.by}={runs}"] if runs else [])]

    def command(self) -> str:
        """The command, to be pasted into a shell; `PATH` stands for the data's folder."""
        if self.script:
            return f"python {self.script}"
        return command_line(*self.overrides(Path("PATH") if self.data else None))


def read(folders: Sequence[Path]) -> dict[str, Record]:
    """All records, by name; a later folder's stand in the place of those of the same name.

    Args:
        folders: with conf's groups in them.

    Raises:
        UserError: a record is not complete, naming file and key.
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


def named(records: Mapping[str, Record], name: str) -> Record:
    """The record of this name.

    Raises:
        UserError: there is none, with the nearest name.
    """
    if name not in records:
        hint = nearest(name, records) or f"\n  there are {', '.join(records) or 'none'}"
        raise UserError(f"reproduce.name: no record {name!r}{hint}\n  run=reproduce lists them")
    return records[name]


def _record(path: Path, content: Mapping[str, Any]) -> Record:
    where = f"{short(path)}: record"
    given = _mapping(where, content["record"])
    for key, kind in (("published", Figure), ("ours", Figure), ("data", Data)):
        if given.get(key) is not None:
            part = _mapping(f"{where}.{key}", given[key])
            _check(f"{where}.{key}", kind, part)
            given[key] = kind(**part)
    by = "splits" if content.get("splits") else "seeds"
    runs = content.get(by) or 1
    runs = (content.get("data") or {}).get("num_splits") if runs == "all" else runs
    given |= {"name": path.stem, "runs": runs, "by": by, "conf": path.parents[1]}
    _check(where, Record, given)
    record = Record(**given)
    if record.ours is None and not record.why:
        raise UserError(f"{where}.why: missing; say why nothing was measured")
    if record.ours is not None and not (record.date and record.machine):
        raise UserError(f"{where}: a measured figure needs its date and machine")
    return record


def _mapping(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: expected a mapping, got {given!r}")
    return {str(key): value for key, value in given.items() if value is not None}


def _check(where: str, kind: type, given: Mapping[str, Any]) -> None:
    """Each key is a field of the class and has its type, and none is missing."""
    parameters = known(f"{kind.__module__}.{kind.__name__}").parameters
    for key, value in given.items():
        if key not in parameters:
            hint = nearest(key, parameters) or f"; it has {', '.join(parameters)}"
            raise UserError(f"{where}.{key}: there is no such key{hint}")
        if type(value).__module__ == "builtins" and not accepts(parameters[key], value):
            wanted = expected(parameters[key])
            raise UserError(f"{where}.{key}: expected {wanted}, got {value!r}")
    for field in fields(kind):
        if field.default is MISSING and field.name not in given:
            raise UserError(f"{where}.{field.name}: missing")
