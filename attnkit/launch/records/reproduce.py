"""`run=reproduce`: lists the records, or runs some of them again and says how they compare."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

from omegaconf import OmegaConf

from attnkit.launch.command import dotted_key
from attnkit.launch.config.schema import REPRODUCE
from attnkit.launch.config.signatures import known
from attnkit.launch.config.validate import check_arguments
from attnkit.launch.errors import CRASHED, INTERRUPTED, Interrupted, fail, summary
from attnkit.launch.job import folder as folders
from attnkit.launch.job.execute import execute
from attnkit.launch.job.job import Job
from attnkit.launch.job.request import Request, check_uses, decide
from attnkit.launch.processes.torchrun import Launcher
from attnkit.launch.records import record as records
from attnkit.launch.records.record import Record
from attnkit.launch.records.table import Row, listing, save, show
from attnkit.launch.records.verdict import Figure
from attnkit.launch.signals import raise_received
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
from attnkit.lightning.files import absolute

_TYPED = ("run", "reproduce", "data.root", "seeds", "run_dir", "allow")


def command(request: Request, launcher: Launcher | None = None) -> int:
    """List the records, or run those that are asked for; returns the exit code.

    1 if one of them has failed. A figure that is below or above is no failure.
    """
    _check(request, launcher)
    there_are = records.read(request.composer.folders())
    asked = request.config["reproduce"]
    root = _root(request)
    if asked["name"] is not None:
        names = [asked["name"]] if isinstance(asked["name"], str) else asked["name"]
        chosen = [records.named(there_are, name) for name in dict.fromkeys(names)]
    elif asked["minutes"] is not None:
        chosen = _fitting(list(there_are.values()), asked["minutes"], root)
    else:
        listing(list(there_are.values()))
        return 0
    return _Reproduction(request, root, asked["minutes"]).run(chosen)


def _check(request: Request, launcher: Launcher | None) -> None:
    """Refuse what is typed and would change a record, or do nothing."""
    if launcher:
        raise UserError(f"run=reproduce: not under {launcher.name}; it is one process")
    check_uses(request)
    for typed in request.overrides:
        key = dotted_key(typed)
        if key in _TYPED or key.startswith("reproduce."):
            continue
        instead = "; run one with a change by experiment=NAME key=value"
        if key == "experiment":
            instead = f"; reproduce.name={typed.partition('=')[2]}"
        elif key.startswith("data."):
            instead = "; of data only data.root=PATH"
        raise UserError(f"{typed}: not for run=reproduce, which runs records as they are{instead}")
    asked: Any = OmegaConf.to_container(request.config["reproduce"])
    check_arguments("reproduce", asked, known(REPRODUCE), request.origins, what="run=reproduce")
    if asked["minutes"] is not None and asked["minutes"] <= 0:
        raise UserError(f"reproduce.minutes: expected more than 0, got {asked['minutes']}")


def _root(request: Request) -> Path | None:
    if not request.typed("data.root"):
        return None
    root = absolute(str(request.config["data"]["root"]))
    if not root.is_dir():
        raise UserError(f"data.root: no folder {root}")
    return root


def _fitting(there_are: Sequence[Record], minutes: float, root: Path | None) -> list[Record]:
    """The shortest records, as many as fit; prints why the others are left out."""
    from torch.cuda import is_available

    chosen: list[Record] = []
    left: dict[str, list[str]] = {}
    total = 0.0
    for record in sorted(there_are, key=lambda record: record.minutes or 0):
        if record.gpu and not is_available():
            left.setdefault("a GPU", []).append(record.name)
        elif record.data and not (root and record.data.is_in(root)):
            left.setdefault("its files, data.root=PATH", []).append(record.name)
        elif record.minutes is None:
            left.setdefault("a time on record", []).append(record.name)
        elif total + record.minutes > minutes:
            left.setdefault(f"more than is left of {minutes:g} minutes", []).append(record.name)
        else:
            total += record.minutes
            chosen.append(record)
    if not chosen:
        raise UserError(f"reproduce.minutes={minutes:g}: no record fits; run=reproduce lists them")
    for needs, names in left.items():
        print(f"left out, each needs {needs}: {', '.join(names)}")
    print(f"{len(chosen)} records, {total:g} minutes on the machines of their figures", flush=True)
    return chosen


class _Reproduction:
    """The records of one command, in a folder with a folder for each.

    Args:
        root: what was given for `data.root`.
        minutes: after which no further record starts.
    """

    def __init__(self, request: Request, root: Path | None, minutes: float | None) -> None:
        self.request, self.root = request, root
        self.seconds = float("inf") if minutes is None else 60 * minutes
        self.runs = int(request.config["seeds"]) if request.typed("seeds") else None
        given = request.config.get("run_dir")
        self.folder = folders.plan(given, "reproduce")
        self.fresh = given is None

    def run(self, chosen: Sequence[Record]) -> int:
        """Run the records in turn; the table is written even if this ends early."""
        for record in chosen:
            self._job(record)  # what is wrong with one is an error now
        self.folder = folders.create(self.folder, fresh=self.fresh)
        print(f"{len(chosen)} records in {self.folder}", flush=True)
        started = time.monotonic()
        rows = [Row(record, self.folder / record.name) for record in chosen]
        try:
            for row in rows:
                if time.monotonic() - started > self.seconds:
                    row.state = "not started, the time was up"
                    continue
                print(f"\n{row.record.name}: {row.record.what}", flush=True)
                self._run(row)
                save(self.folder, rows)
        except (KeyboardInterrupt, StoppedBySignal) as error:
            row.state = "interrupted"
            save(self.folder, rows)
            by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else "interrupted"
            raise Interrupted(
                getattr(error, "said", by),
                f"; what was done is in {self.folder}",
                getattr(error, "code", INTERRUPTED),
            ) from None
        save(self.folder, rows)
        show(self.folder, rows)
        return CRASHED if any(row.error for row in rows) else 0

    def _run(self, row: Row) -> None:
        record, started = row.record, time.monotonic()
        try:
            if record.script:
                _run_script(record, row.folder, self.runs or record.runs)
            else:
                job = self._job(record)
                assert job is not None
                execute(job)
            row.now = figure(record, row.folder)
            row.state = "done"
        except Exception as error:
            raise_received()  # what a signal has broken off may fail in any way
            row.state, row.error = "failed", summary(error)
            fail(error, CRASHED, f"{record.name}: ")
        row.seconds = time.monotonic() - started

    def _job(self, record: Record) -> Job | None:
        """What is to be done for an experiment; None for a script.

        Raises:
            UserError: a file is missing, or the experiment is wrong.
        """
        if record.data is not None and self.root is None:
            raise UserError(
                f"{record.name}: needs data.root=PATH, the folder of {record.data.file}\n"
                f"  or one with the folder {record.data.folder} in it"
            )
        if record.script:
            _ = record.path
            return None
        allow = [o for o in self.request.overrides if dotted_key(o) == "allow"]
        words = [*record.overrides(self.root, self.runs), *allow]
        return decide(Request.read(self.request.composer, words), self.folder / record.name)


def _run_script(record: Record, folder: Path, runs: int) -> None:
    """Its `main(seed=…, picture=…)` for each seed; what it returns is in results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    main, started = run_path(str(record.path))["main"], time.monotonic()
    values = [float(main(seed=s, picture=str(folder / f"seed_{s}.png"))) for s in range(runs)]
    results = {record.metric: statistics.fmean(values), "num_seeds": runs}
    if runs > 1:
        results[f"{record.metric}_std"] = statistics.stdev(values)
    folders.save_results(folder, {**results, "seconds": round(time.monotonic() - started, 2)})


def figure(record: Record, folder: Path) -> Figure:
    """The figure that a run has left, in the unit of its record."""
    results = folders.load_results(folder)
    if record.metric not in results:
        raise RunError(f"{record.metric}: not among the results: {', '.join(results)}")
    scale = 100 if record.unit == "%" else 1
    mean, runs = scale * results[record.metric], int(results["num_seeds"])
    spread = results.get(f"{record.metric}_std") if runs > 1 else None
    if record.unit == "%":
        return Figure(round(mean, 2), None if spread is None else round(scale * spread, 2), runs)
    return Figure(float(f"{mean:.3g}"), None if spread is None else float(f"{spread:.2g}"), runs)
