"""Does what was decided: folders, seeds, processes, results. Knows neither Hydra nor a task."""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.launch.errors import INTERRUPTED, Interrupted
from attnkit.launch.job import folder as folders
from attnkit.launch.job import out_of_memory as oom
from attnkit.launch.processes import start_ranks as ranks
from attnkit.launch.processes.torchrun import Launcher
from attnkit.launch.signals import raise_received
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError
from attnkit.lightning.files import replacing

if TYPE_CHECKING:
    from attnkit.launch.job.work import Work

# Results that differ between seeds by chance; those get a spread.
SPREAD = ("test/", "val/")


@dataclass
class Job:
    """One command: the run folder, its configuration, and one resolved configuration per seed."""

    folder: Path
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    allow: tuple[str, ...] = ()
    """The user's own packages."""
    paths: tuple[str, ...] = ()
    """Folders of the user's own modules."""
    alone: bool = False
    """The checkpoint has no run folder around it: everything comes from inside it."""
    resumed: bool = False
    changes: tuple[str, ...] = ()
    """Overrides given beside resume=."""


@dataclass
class Outcome:
    """How a job ended."""

    code: int
    folder: Path
    results: dict[str, float] = field(default_factory=dict)


def execute(job: Job, launcher: Launcher | None = None) -> Outcome:
    """Run a job and print its tables; the folder is made once every constructor was happy."""
    if job.resumed and _is_done(job):
        return _nothing_to_do(job)
    if job.config["run"] == "check":
        from attnkit.launch.measure.check import check

        return Outcome(0, job.folder, check(job, launcher))
    from attnkit.lightning.build.build import allowing

    started = time.perf_counter()
    with allowing(*job.allow), _taken_back_if_in_vain(job):
        from attnkit.launch.job import screen as report
        from attnkit.launch.job.work import Work

        report.quiet()
        work = Work(job.runs[0], alone=job.alone)
        raise_received()
        _check_processes(work, launcher)
        _make_folders(job, work)
        with report.logging_to(job.folder):
            report.header(job, work)
            for number, config in enumerate(job.runs):
                if number:
                    if folders.is_finished(_folder_of(config)):
                        continue
                    work = Work(config, alone=job.alone)
                elif len(job.runs) > 1 and folders.is_finished(_folder_of(config)):
                    continue
                if len(job.runs) > 1:
                    report.say(_folder_of(config).name.replace("_", " "))
                folders.save_config(_folder_of(config), work.config)
                _run_one(job, work, launcher)
                _mark_finished(_folder_of(work.config))
            results = _summarise(job, time.perf_counter() - started)
            report.final(job, results)
    return Outcome(0, job.folder, results)


@contextmanager
def _taken_back_if_in_vain(job: Job) -> Iterator[None]:
    """What only the start of a run can see to be wrong leaves nothing behind either, nor does what
    was stopped before it wrote anything."""
    made = folders.absent(job.folder)
    # of a trial of a sweep that is tried again, the log and the errors of before
    kept = job.folder.is_dir() and any(job.folder.iterdir())
    try:
        yield
    except UserError:
        if not job.resumed and not kept:
            folders.take_back(job.folder, made)
        raise
    except Interrupted:
        # nothing goes on there: the same command is to find the folder free
        if job.config["run"] != "train" and not kept and folders.is_bare(job.folder):
            folders.take_back(job.folder, made)
        raise


def _make_folders(job: Job, work: "Work") -> None:
    """The run folder with its configuration; the name may have been taken in the meantime."""
    folder = folders.create(job.folder, fresh=not job.resumed and not job.folder.exists())
    if folder != job.folder:
        job.config = folders.relocate(job.config, job.folder, folder)
        job.runs = [folders.relocate(c, job.folder, folder) for c in job.runs]
        job.folder = folder
        work.move(job.runs[0])
    for config in job.runs:
        if config is not job.config:
            folders.create(_folder_of(config), fresh=False)
            folders.save_config(_folder_of(config), config)
    top = work.config if len(job.runs) == 1 else job.config
    folders.save_config(job.folder, top)
    if job.resumed:  # until it ends again, it is not finished
        for path in (job.folder, *(_folder_of(c) for c in job.runs if not _finished(c))):
            results = folders.load_results(path)
            if results.pop("num_seeds", None):
                save_results(path, results)


def _check_processes(work: "Work", launcher: Launcher | None) -> None:
    if work.config["run"] == "bench" and work.trainer.world_size > 1:
        raise UserError("run=bench: one process; trainer.devices=1 trainer.strategy=auto")
    if launcher:
        launcher.check(work.trainer)
    elif work.trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes: {work.trainer.num_nodes}, but nothing has started the processes "
            "on the other nodes\n  use srun or torchrun"
        )


def _run_one(job: Job, work: "Work", launcher: Launcher | None) -> None:
    """One run; when its training has no more memory, again with smaller batches."""
    while True:
        try:
            return _start(job, work, launcher)
        except oom.OutOfMemory as error:
            if launcher:  # whose ranks have ended, and only it could start them again
                raise RunError(
                    f"out of memory: {error}\n  under {launcher.name} not tried again; smaller: "
                    "data.batch_size, with trainer.accumulate_grad_batches"
                ) from None
            why = str(error)  # the error itself holds the tensors of the step
        _shrink(work, why)


def _shrink(work: "Work", why: str) -> None:
    from attnkit.launch.job import screen as report

    folder = _folder_of(work.config)
    results = folders.load_results(folder)
    tries = int(results.get(oom.RETRIES, 0))
    config, said = oom.smaller(work.config, tries, why)
    report.say(said)
    save_results(folder, {**results, oom.RETRIES: tries + 1})
    folders.save_config(folder, config)
    work.start_again(config)


def _start(job: Job, work: "Work", launcher: Launcher | None) -> None:
    folder = _folder_of(work.config)
    try:
        if work.needs_processes:
            command = [sys.executable, "-m", "attnkit.launch.processes.one_rank", str(folder)]
            command += [f"--log={job.folder}"]
            command += [f"--allow={package}" for package in job.allow]
            command += [f"--path={path}" for path in job.paths]
            command += ["--alone"] if job.alone else []
            ranks.start(command, work.trainer.num_devices)
        else:
            if launcher:
                launcher.tell(
                    run_dir=str(folder),
                    log=str(job.folder),
                    allow=job.allow,
                    path=job.paths,
                    alone=job.alone,
                )
            work.run()
    except (KeyboardInterrupt, StoppedBySignal) as error:
        step = getattr(error, "step", work.trainer.global_step)
        by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else "interrupted"
        after = f" after step {step}" if step else ""
        code = getattr(error, "code", INTERRUPTED)
        raise Interrupted(f"{by}{after}; to go on: {_to_go_on(job, work)}", code) from None


def _to_go_on(job: Job, work: "Work") -> str:
    if work.config["run"] != "train":
        return "start it again"
    own = f" --config-dir {job.paths[0]}" if job.paths else ""
    return f"attnkit {folders.as_override('resume', job.folder)}{own}"


def _folder_of(config: Mapping[str, Any]) -> Path:
    return Path(config["run_dir"])


def _finished(config: Mapping[str, Any]) -> bool:
    """Whether a run came to its end and its configuration asks for no more epochs since."""
    folder = _folder_of(config)
    if not folders.is_finished(folder):
        return False
    asked = (config.get("trainer") or {}).get("max_epochs")
    return asked is None or folders.load_results(folder).get("epochs", asked) >= asked


def _is_done(job: Job) -> bool:
    return folders.is_finished(job.folder) and all(map(_finished, job.runs))


def _nothing_to_do(job: Job) -> Outcome:
    results = folders.load_results(job.folder)
    figures = ", ".join(f"{k} {v:.4g}" for k, v in results.items() if k.startswith("test/"))
    print(f"finished already: {job.folder}\n  {figures}")
    print("  to train longer: trainer.max_epochs=N with a larger N")
    return Outcome(0, job.folder, results)


def _mark_finished(folder: Path) -> None:
    save_results(folder, {**folders.load_results(folder), "num_seeds": 1})


def _summarise(job: Job, seconds: float) -> dict[str, float]:
    """results.json of the job: of several seeds, the means and standard deviations."""
    parts = [folders.load_results(_folder_of(config)) for config in job.runs]
    shared = set.intersection(*map(set, parts))
    results: dict[str, float] = {}
    for key in sorted(shared - {"num_seeds"}):
        values = [part[key] for part in parts]
        results[key] = statistics.fmean(values) if len(parts) > 1 else values[0]
        if key.startswith(SPREAD):
            results[f"{key}_std"] = statistics.stdev(values) if len(parts) > 1 else 0.0
    if retries := sum(part.get(oom.RETRIES, 0) for part in parts):
        results[oom.RETRIES] = retries
    results["num_seeds"] = len(parts)
    results["seconds"] = round(seconds, 2)
    save_results(job.folder, results)
    return results


def save_results(folder: Path, results: Mapping[str, float]) -> None:
    """Write results.json, whole or not at all."""
    text = json.dumps(dict(results), indent=2, sort_keys=True, allow_nan=False)
    with replacing(folder / folders.RESULTS) as file:
        file.write(f"{text}\n".encode())
