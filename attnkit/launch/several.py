"""Carries out a job: its folders, seeds, processes and results. Knows neither Hydra nor a task.

Training that runs out of memory is repeated from the last checkpoint, with half the batch size and
twice the gradient accumulation.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.launch import folder as folders
from attnkit.launch.command import command_line, setting
from attnkit.launch.decide import Job
from attnkit.launch.errors import INTERRUPTED, MOST_HALVINGS, Interrupted, OutOfMemory
from attnkit.launch.processes.locks import holder, locked
from attnkit.launch.processes.process import raise_received
from attnkit.launch.processes.torchrun import Launcher
from attnkit.lightning.errors import RunError, StoppedBySignal, UserError

if TYPE_CHECKING:
    from attnkit.launch.run import Run

# Prefixes of results that vary with the seed and therefore get a standard deviation.
SPREAD = ("test/", "val/")

OOM_RETRIES = "oom_retries"  # in results.json

_CLOCKS = {"max_time", "minutes"}  # arguments of the trainer that limit its time

# Arguments of the trainer that count batches if they are whole numbers.
_BATCHES = (
    "limit_batches", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "val_check_interval",
)  # fmt: skip


def carry_out(job: Job, launcher: Launcher | None = None) -> Run | None:
    """Run a job and print its tables; a job that can't be built leaves nothing behind.

    Returns:
        the last run, if it was carried out in this process; None if ranks carried it out, or the
        job was finished before.
    """
    over = (_is_over(config, job.changes) for config in job.runs)
    if job.resumed and folders.is_finished(job.folder) and all(over):
        _say_finished(job)
        return None
    run: Run | None = None
    with _run_folder(job):  # refuses a folder in use before torch is imported
        from attnkit.launch import console
        from attnkit.lightning.build import allowing

        console.quiet()
        with allowing(*job.allow), console.logging_to(job.folder):
            for config in job.runs:
                folder = Path(config["run_dir"])
                if len(job.runs) > 1:
                    if _is_over(config, job.changes):
                        run = None
                        continue
                    console.say(folder.name.replace("_", " "))
                run = None  # frees its model before the next one is built
                with _held(job, folder):
                    run = _run_one(job, config, launcher)
            console.final(job, _summarise(job))
            folders.ended(job.folder, folders.DONE)
    return run


@contextmanager
def _run_folder(job: Job) -> Iterator[None]:
    """Lock the folder against other processes; remove it if the command produced nothing."""
    made = folders.absent(job.folder)
    # a trial's folder already holds its output
    is_new = folders.is_bare if job.trial else folders.is_empty
    kept = job.resumed or (job.trial and not is_new(job.folder))
    folder = folders.create(job.folder, fresh=job.fresh)
    if folder != job.folder:  # another command took the name in the meantime
        job.config = folders.relocate(job.config, job.folder, folder)
        job.runs = [folders.relocate(c, job.folder, folder) for c in job.runs]
        job.folder = folder
    with _held(job, folder):
        if not kept and not is_new(folder):
            raise UserError(f"run_dir: {folder} is not empty: another command has just used it")
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, Interrupted)
            state = folders.STOPPED if stopped else folders.FAILED
            wanted = job.begun and not isinstance(error, UserError)
            if stopped and not job.mode.trains:
                # it can't be resumed, so the same command must find the folder free
                wanted = not folders.is_bare(folder)
            if not kept and not wanted:
                folders.take_back(folder, made)
            for path in {folder, *(Path(config["run_dir"]) for config in job.runs)}:
                if folders.load_state(path).get("state") == folders.RUNNING:
                    folders.save_state(path, state)
            if job.begun and folder.is_dir():
                folders.ended(folder, state)
            raise


@contextmanager
def _held(job: Job, folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder; refuse a folder in which another process runs."""
    lock = folder / folders.LOCK
    with locked(lock) as mine:
        if not mine:
            key = "resume" if job.resumed else "run_dir"
            raise UserError(f"{key}: {folder} is in use by {holder(lock)}")
        yield


def _run_one(job: Job, config: dict[str, Any], launcher: Launcher | None) -> Run | None:
    """Carry out one run; if its training runs out of memory, repeat it with smaller batches.

    Returns:
        the run; None if ranks carried it out.
    """
    from attnkit.launch import console

    while True:
        try:
            return _start(job, config, launcher)
        except OutOfMemory as error:
            if launcher:  # the ranks have ended, and only the launcher could start them again
                raise RunError(
                    f"out of memory: {error}\n  not repeated under {launcher.name}; use a smaller "
                    "data.batch_size and a larger trainer.accumulate_grad_batches"
                ) from None
            why = str(error)  # the error itself keeps the tensors of the step alive
        gc.collect()
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        folder = Path(config["run_dir"])
        results = folders.load_results(folder)
        tries = int(results.get(OOM_RETRIES, 0))
        config, message = smaller(folders.load_config(folder), tries, why)
        console.say(message)
        folders.save_results(folder, {**results, OOM_RETRIES: tries + 1})
        folders.save_config(folder, config)


class _InRanks(Exception):
    """Raised when ranks in processes of their own must carry out a run that was built here."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def _start(job: Job, config: dict[str, Any], launcher: Launcher | None) -> Run | None:
    """Attempt a run once, in this process or in ranks of its own."""
    from attnkit.launch.run import Run

    run: Run | None = None
    try:
        begin = partial(_begin, job, launcher)
        try:
            run = Run(config, alone=job.alone, callbacks=job.callbacks, on_ready=begin)
            raise_received()
            run.carry_out()
            return run
        except _InRanks as found:
            count = found.count
        from attnkit.launch.processes import ranks

        run = None  # the ranks have a model and data of their own
        given = {"run_dir": config["run_dir"], "log": str(job.folder), "alone": job.alone}
        ranks.start({**given, "allow": job.allow, "path": job.paths}, count)
        return None
    except (KeyboardInterrupt, StoppedBySignal) as error:
        if not job.begun:
            raise
        trainer = getattr(run, "trainer", None)
        step = getattr(error, "step", trainer.global_step if trainer else 0)
        by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else "interrupted"
        after = f" after step {step}" if step else ""
        code = getattr(error, "code", INTERRUPTED)
        go_on = "start it again"
        if job.mode.trains:
            go_on = command_line(setting("resume", job.folder), permission=job.permission)
        raise Interrupted(f"{by}{after}", f"; to go on: {go_on}", code) from None


def _begin(job: Job, launcher: Launcher | None, run: Run) -> None:
    """Write the configuration and print the header of a run, once all its objects are built."""
    from attnkit.launch import console
    from attnkit.lightning._private import starts_processes

    trainer = run.trainer
    if launcher:
        launcher.check(trainer)
    elif trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes: {trainer.num_nodes}, but nothing has started the processes "
            "on the other nodes\n  use srun or torchrun"
        )
    if not job.begun:
        folders.save_config(job.folder, job.config)
        folders.save_state(job.folder, folders.RUNNING)
        for config in job.runs:
            folder = folders.create(Path(config["run_dir"]), fresh=False)
            folders.save_config(folder, config)
    folders.save_config(run.folder, run.config)
    folders.save_state(run.folder, folders.RUNNING)
    if not job.begun:
        folders.started(job.folder, job.command, trainer, run.from_data)
        console.header(job, run)
    if run.start:
        console.say(f"from {run.start}: {run.newest.why}")
    job.begun = True
    if starts_processes(trainer):  # ranks.py does it instead of Lightning
        raise _InRanks(trainer.num_devices)
    if launcher:
        launcher.tell(run_dir=str(run.folder), log=str(job.folder))


def _is_over(config: dict[str, Any], changes: Sequence[str]) -> bool:
    """Return whether a run is finished and its configuration asks for no more training."""
    folder = Path(config["run_dir"])
    if not folders.is_finished(folder):
        return False
    state, trainer = folders.load_state(folder), config.get("trainer") or {}
    if state.get("ended_by") == "callback":  # a changed callback may allow more training
        return not any(change.lstrip("+~").startswith("callbacks") for change in changes)
    if (limit := state.get("ended_by")) in _CLOCKS:
        before = folders.load_config(folder).get("trainer") or {}
        return trainer.get(limit) == before.get(limit)
    for limit, done in (("max_steps", "steps"), ("max_epochs", "epochs")):
        asked = trainer.get(limit)
        if limit == "max_epochs" and state.get("ended_by") == "max_steps":
            continue  # the last epoch is counted, although it may be incomplete
        if asked is not None and 0 < asked <= state.get(done, asked):
            return True
    return trainer.get("max_epochs") is None


def _say_finished(job: Job) -> None:
    results = folders.load_results(job.folder)
    tested = [k for k in results if k.startswith("test/") and not k.endswith("_std")]
    figures = ", ".join(f"{k} {results[k]:.4g}" for k in tested)
    print(f"finished already: {job.folder}\n  {figures}")
    ends = {folders.load_state(Path(c["run_dir"])).get("ended_by", "") for c in job.runs}
    if "callback" in ends:
        print("  a callback ended it; to train longer, change its settings: callbacks.…")
    elif clock := ends & _CLOCKS:
        name = f"trainer.{clock.pop()}"
        print(f"  {name} ended it; to train longer: {name}=null, or a longer one")
    else:
        limit = "max_steps" if "max_steps" in ends else "max_epochs"
        print(f"  to train longer: trainer.{limit}=N with a larger N")


def _summarise(job: Job) -> dict[str, float]:
    """Write and return the job's results.json: over several runs, means and deviations."""
    parts = [folders.load_results(Path(config["run_dir"])) for config in job.runs]
    shared = set.intersection(*map(set, parts))
    results: dict[str, float] = {}
    for key in sorted(shared - {"num_seeds"}):
        values = [part[key] for part in parts]
        results[key] = statistics.fmean(values) if len(parts) > 1 else values[0]
        if len(parts) > 1 and key.startswith(SPREAD):
            results[f"{key}_std"] = statistics.stdev(values)
    if retries := sum(part.get(OOM_RETRIES, 0) for part in parts):
        results[OOM_RETRIES] = retries
    results["num_seeds"] = len(parts)
    results["seconds"] = round(sum(part.get("seconds", 0.0) for part in parts), 2)
    folders.save_results(job.folder, results)
    if len(parts) > 1:
        folders.save_state(job.folder, folders.DONE)
    return results


def smaller(config: Mapping[str, Any], tries: int, why: str) -> tuple[dict[str, Any], str]:
    """Return the configuration with half the batch size, and a message that describes the change.

    The number of accumulated batches is doubled, so that the effective batch size, the number of
    optimizer steps and the schedule stay the same; an odd batch size makes each step smaller by one
    sample for each batch accumulated so far. Batch normalization sees the smaller batches.

    Args:
        tries: how often the batch was halved before.
        why: the message of the allocator.

    Raises:
        RunError: there is no batch to halve, or halving it `MOST_HALVINGS` times did not help.
    """
    data, trainer = dict(config.get("data") or {}), dict(config.get("trainer") or {})
    batch, accumulated = data.get("batch_size"), trainer.get("accumulate_grad_batches") or 1
    if type(batch) is not int:
        what = "this data has no data.batch_size" if "batch_size" not in data else (
            f"data.batch_size={'null' if batch is None else batch}"
        )  # fmt: skip
        raise RunError(f"out of memory, and no batch to halve: {what}\n  {why}")
    if tries >= MOST_HALVINGS or batch < 2:
        halved = f", halved {tries} times" if tries else ""
        raise RunError(
            f"out of memory with batches of {batch}{halved}\n  {why}\n"
            "  a smaller model or input takes less"
        )
    data["batch_size"] = batch // 2
    trainer["accumulate_grad_batches"] = 2 * accumulated
    trainer |= {k: 2 * trainer[k] for k in _BATCHES if type(trainer.get(k)) is int}
    message = (
        f"out of memory with batches of {batch}: again with {batch // 2}, "
        f"{2 * accumulated} to a step (trainer.oom_retry=false turns this off)"
    )
    if batch % 2:
        message += f"; a step has {batch // 2 * 2 * accumulated} instead of {batch * accumulated}"
    return {**config, "data": data, "trainer": trainer}, message
