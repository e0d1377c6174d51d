"""`run=reproduce`: lists the records, or runs some of them again and compares the results."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from runpy import run_path
from shutil import get_terminal_size
from typing import Any

from omegaconf import OmegaConf

from attnkit.core.names import nearest
from attnkit.launch import folder as folders
from attnkit.launch.command import dotted_key
from attnkit.launch.config.schema import REPRODUCE
from attnkit.launch.config.signatures import known
from attnkit.launch.config.validate import check_arguments
from attnkit.launch.decide import Job, Request, decide
from attnkit.launch.errors import CRASHED, fail, summary
from attnkit.launch.modes.rules import check_uses
from attnkit.launch.processes.process import raise_received
from attnkit.launch.processes.torchrun import Launcher
from attnkit.launch.records import Figure, Record, grouped, read, verdict
from attnkit.launch.several import carry_out
from attnkit.lightning.console import in_line, seconds
from attnkit.lightning.errors import RunError, UserError
from attnkit.lightning.files import absolute, write_csv, write_text

CSV, MARKDOWN = "table.csv", "table.md"
_TYPED = ("run", "reproduce", "data.root", "seeds", "run_dir", "allow")
_LISTED = ("record", "published", "ours", "time", "needs", "what")
_COMPARED = ("record", "published", "on record", "now", "verdict", "time")
_TO_THE_RIGHT = ("published", "ours", "on record", "now", "time")
_LEGEND = """
published: from the paper; ours: measured here; ±: over seeds or splits.
time: of all runs together, on the machine named in docs/records.md.
  attnkit run=reproduce reproduce.name=NAME [data.root=PATH]  run one
  attnkit run=reproduce reproduce.minutes=N [data.root=PATH]  run all that fit"""
_RULE = """
within spread: |now - reference| is at most sqrt(s^2 + s_ref^2), or half a unit of
the reference's last digit. The reference is the published figure if there is one,
else the figure on record."""
_WIDE = 120  # columns of a screen wide enough for the column "what"


@dataclass
class Row:
    """A record that is run again, and its result so far."""

    record: Record
    folder: Path
    now: Figure | None = None
    seconds: float | None = None
    state: str = "waiting"
    error: str = ""

    def cells(self) -> dict[str, Any]:
        """The row of table.csv, by column."""
        record, now = self.record, self.now
        reference = record.published or record.ours
        compared = verdict(now, reference) if now and reference else ""
        return {
            "record": record.name,
            "metric": record.metric,
            "unit": record.unit,
            **_numbers("published", record.published),
            **_numbers("on_record", record.ours),
            **_numbers("now", now),
            "runs": now.runs if now else None,
            "verdict": compared,
            "against": compared and ("published" if record.published else "on record"),
            "seconds": None if self.seconds is None else round(self.seconds, 2),
            "state": self.state,
            "error": self.error,
            "folder": str(self.folder),
        }

    def texts(self) -> list[str]:
        """The row as text, with the columns of `_COMPARED`."""
        figures = (self.record.published, self.record.ours, self.now)
        outcome = self.cells()["verdict"] if self.state == "done" else self.state
        time_taken = "" if self.seconds is None else seconds(self.seconds)
        return [self.record.name, *(str(figure or "") for figure in figures), outcome, time_taken]


def command(request: Request, launcher: Launcher | None = None) -> int:
    """List the records, or run the chosen ones; return the exit code.

    It is 1 if a record has failed. A result below or above its reference is no failure.
    """
    root, runs = _checked(request, launcher)
    name, minutes = request.config["reproduce"]["name"], request.config["reproduce"]["minutes"]
    records = read(request.composer.folders)
    if name is None and minutes is None:
        _list(records.values())
        return 0
    if name is None:
        chosen = _fitting(records.values(), minutes, root)
    else:
        chosen = _named(records, [name] if isinstance(name, str) else name)
    given = request.config.get("run_dir")
    folder = folders.plan(given, "reproduce")
    for record in chosen:  # raises errors of all records before the first one runs
        _job(request, record, folder, root, runs)
    folder = folders.create(folder, fresh=given is None)
    print(f"{len(chosen)} records in {folder}", flush=True)
    rows = [Row(record, folder / record.name) for record in chosen]
    started = time.monotonic()
    for row in rows:
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            row.state = "not started, the time was up"
            continue
        print(f"\n{row.record.name}: {row.record.what}", flush=True)
        row.state = "interrupted"  # until the record has ended
        _save(folder, rows)
        _run(request, row, root, runs)
    _save(folder, rows)
    print("", *_aligned([_COMPARED, *(row.texts() for row in rows)]), _RULE, sep="\n")
    for row in rows:
        if row.error:
            print(f"{row.record.name}: {' '.join(row.error.split())}")
    print(f"  table  {folder / CSV}\n         {folder / MARKDOWN}")
    return CRASHED if any(row.error for row in rows) else 0


# --- which records --------------------------------------------------------------------------------


def _checked(request: Request, launcher: Launcher | None) -> tuple[Path | None, int | None]:
    """Return the typed `data.root` and the typed number of runs, or None for each.

    Raises:
        UserError: an override would change a record, or has no effect.
    """
    if launcher:
        raise UserError(f"run=reproduce: not under {launcher.name}; it runs in one process")
    check_uses(request)
    for typed in request.overrides:
        if dotted_key(typed) not in _TYPED and not dotted_key(typed).startswith("reproduce."):
            raise UserError(
                f"{typed}: not for run=reproduce, which runs records as they are; below data only "
                "data.root=PATH\n  to change a record: experiment=NAME key=value, without run="
            )
    asked: Any = OmegaConf.to_container(request.config["reproduce"])
    check_arguments("reproduce", asked, known(REPRODUCE), request.origins, what="run=reproduce")
    if asked["minutes"] is not None and asked["minutes"] <= 0:
        raise UserError(f"reproduce.minutes: expected more than 0, got {asked['minutes']}")
    runs = int(request.config["seeds"]) if request.typed("seeds") else None
    if not request.typed("data.root"):
        return None, runs
    root = absolute(str(request.config["data"]["root"]))
    if not root.is_dir():
        raise UserError(f"data.root: no folder {root}")
    return root, runs


def _named(records: Mapping[str, Record], names: Sequence[str]) -> list[Record]:
    if not names:
        raise UserError("reproduce.name=[]: expected at least one name; run=reproduce lists them")
    for name in names:
        if name not in records:
            hint = nearest(name, records) or f"\n  records: {', '.join(records) or 'none'}"
            raise UserError(f"reproduce.name: no record {name!r}{hint}\n  run=reproduce lists them")
    return [records[name] for name in dict.fromkeys(names)]


def _fitting(records: Iterable[Record], minutes: float, root: Path | None) -> list[Record]:
    """Return the shortest records that fit into the time; print why the others are left out."""
    from torch.cuda import is_available

    chosen: list[Record] = []
    left: dict[str, list[str]] = {}
    total = 0.0
    for record in sorted(records, key=lambda record: record.minutes or 0):
        if record.gpu and not is_available():
            left.setdefault("a GPU", []).append(record.name)
        elif record.data and not (root and record.data.is_in(root)):
            left.setdefault("its files, data.root=PATH", []).append(record.name)
        elif record.minutes is None:
            left.setdefault("a time on record", []).append(record.name)
        elif total + record.minutes > minutes:
            left.setdefault(f"more time than is left of {minutes:g} minutes", []).append(
                record.name
            )
        else:
            total += record.minutes
            chosen.append(record)
    if not chosen:
        raise UserError(f"reproduce.minutes={minutes:g}: no record fits; run=reproduce lists them")
    for needs, names in left.items():
        print(f"left out, each needs {needs}: {', '.join(names)}")
    print(f"{len(chosen)} records, {total:g} minutes on the machines of their figures", flush=True)
    return chosen


# --- one record -----------------------------------------------------------------------------------


def _job(
    request: Request, record: Record, folder: Path, root: Path | None, runs: int | None
) -> Job | None:
    """Return the job of a record, in a folder below this one; None for a script.

    Raises:
        UserError: a file is missing, or the experiment is invalid.
    """
    if record.data is not None and root is None:
        raise UserError(
            f"{record.name}: needs data.root=PATH, the folder of {record.data.file}\n"
            f"  or one with the folder {record.data.folder} in it"
        )
    if record.script:
        path = _script(record)
        if not path.is_file():
            raise UserError(
                f"{record.name}: no file {path}\n"
                f"  {record.script} is in the repository, which an installed package does not have"
            )
        return None
    allow = [o for o in request.overrides if dotted_key(o) == "allow"]
    words = [*record.overrides(root, runs), *allow]
    return decide(Request.read(request.composer, words), folder / record.name)


def _run(request: Request, row: Row, root: Path | None, runs: int | None) -> None:
    """Run a record, and note its result or its error in the row."""
    record, started = row.record, time.monotonic()
    try:
        if job := _job(request, record, row.folder.parent, root, runs):
            carry_out(job)
        else:
            _run_script(record, row.folder, runs or record.runs)
        row.now = _figure(record, row.folder)
        row.state = "done"
    except Exception as error:
        raise_received()  # code that a signal interrupts may fail in any way
        row.state, row.error = "failed", summary(error)
        fail(error, CRASHED, f"{record.name}: ")
    row.seconds = time.monotonic() - started


def _script(record: Record) -> Path:
    return record.conf.resolve().parent / record.script


def _run_script(record: Record, folder: Path, runs: int) -> None:
    """Call a script's `main(seed=…, picture=…)` for each seed; write the mean to results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    main, started = run_path(str(_script(record)))["main"], time.monotonic()
    values = [float(main(seed=s, picture=str(folder / f"seed_{s}.png"))) for s in range(runs)]
    results = {record.metric: statistics.fmean(values), "num_seeds": runs}
    if runs > 1:
        results[f"{record.metric}_std"] = statistics.stdev(values)
    folders.save_results(folder, {**results, "seconds": round(time.monotonic() - started, 2)})


def _figure(record: Record, folder: Path) -> Figure:
    """Return the figure in a run's results.json, in the unit of its record."""
    results = folders.load_results(folder)
    if record.metric not in results:
        raise RunError(f"{record.metric}: not among the results: {', '.join(results)}")

    def rounded(number: float) -> float:
        return round(100 * number, 2) if record.unit == "%" else float(f"{number:.3g}")

    std = results.get(f"{record.metric}_std")  # missing for a single run
    spread = None if std is None else rounded(std)
    return Figure(rounded(results[record.metric]), spread, int(results["num_seeds"]))


# --- tables ---------------------------------------------------------------------------------------


def _list(records: Iterable[Record]) -> None:
    """Print all records in 80 columns; on a wide screen also what they measure."""
    groups = grouped(records)
    lines = [[*_LISTED]]
    for record in chain(*groups.values()):
        needs = ", ".join(["data"] * (record.data is not None) + ["GPU"] * record.gpu)
        figures = str(record.published or ""), str(record.ours or "")
        lines.append([record.name, *figures, record.time, needs, record.what])
    if get_terminal_size().columns < _WIDE:
        lines = [line[:-1] for line in lines]
    header, *aligned = _aligned(lines)
    print(header)
    for group, inside in groups.items():
        print(f"\n{in_line(group)}")
        for _ in inside:
            print(aligned.pop(0))
    print(_LEGEND)


def _save(folder: Path, rows: Sequence[Row]) -> None:
    """Write table.csv and table.md with the results so far."""
    cells = [row.cells() for row in rows]
    write_csv(folder / CSV, [*cells[0]], [[*row.values()] for row in cells])
    lines = [_COMPARED, ["---"] * len(_COMPARED), *(row.texts() for row in rows)]
    marked = (" | ".join(text.replace("|", "/") for text in line) for line in lines)
    write_text(folder / MARKDOWN, "".join(f"| {line} |\n" for line in marked))


def _aligned(lines: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines with aligned columns; the first line holds the names of the columns."""
    columns = []
    for name, *cells in zip(*lines, strict=True):
        texts = [name, *map(in_line, cells)]
        width = max(map(len, texts))
        right = name in _TO_THE_RIGHT
        columns.append([text.rjust(width) if right else text.ljust(width) for text in texts])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _numbers(name: str, figure: Figure | None) -> dict[str, float | None]:
    mean, std = (figure.mean, figure.std) if figure else (None, None)
    return {name: mean, f"{name}_std": std}
