"""A sweep once more: `-m resume=DIR` goes on with it, `run=retry sweep=DIR` runs what failed.

Permission to run code is not for a file to give, so what sweep.json says of `--config-dir`,
`allow=` and commands of a launcher is asked for, not taken over.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnkit.launch.config.compose import Composer
from attnkit.launch.job.decide import Request, check_resumable
from attnkit.launch.sweep.launchers import BASIC, Launch
from attnkit.launch.sweep.record import Sweep, change_trials, find_sweep, key_of, read_sweep
from attnkit.launch.sweep.start import order_of, run_trials
from attnkit.launch.sweep.study import loop as study
from attnkit.launch.sweep.trial import job_of
from attnkit.lightning.errors import UserError

# Launchers, and how much they may take; nothing that is a command, a path or a text of its own.
_HARMLESS = re.compile(
    r"hydra/launcher=\w+|hydra\.launcher\.(n_jobs|timeout_min|cpus_per_task|gpus_per_node|mem_gb"
    r"|partition|qos|account|constraint|gpus_per_task|cpus_per_gpu|array_parallelism"
    r"|max_num_timeout|signal_delay_s)=[\w.+-]+"
)


def resume(composer: Composer, overrides: Sequence[str]) -> int:
    """Run the trials of a sweep that have not ended; returns the exit code."""
    (given,) = [o for o in composer.parse(overrides) if o.key_or_group == "resume"][-1:]
    if given.is_sweep_override():
        raise UserError(f"{given.input_line}: one sweep at a time")
    sweep = read_sweep(find_sweep(str(given.value()), "resume"))
    is_study = sweep.sweeper == study.NAME
    for override in overrides:
        if key_of(override) in ("resume", "allow") or _is_launcher(override):
            continue
        if not (is_study and study.is_changeable(override)):
            more = "; n_trials, n_jobs and storage of hydra.sweeper" if is_study else ""
            raise UserError(
                f"{override}: can't change in a sweep that goes on\n"
                f"  may change: hydra/launcher and its settings{more}"
            )
    return _run(composer, sweep, overrides)


def retry(request: Request, launcher: object = None) -> int:
    """`run=retry sweep=DIR`: run the failed trials of a sweep again; returns the exit code."""
    if request.config.get("sweep") is None:
        raise UserError("run=retry: needs sweep=PATH, the folder of a sweep, or sweep=latest")
    changes = [
        o
        for o in request.overrides
        if key_of(o) not in ("run", "sweep", "allow") and not _is_launcher(o)
    ]
    check_resumable(changes)
    sweep = read_sweep(find_sweep(str(request.config["sweep"]), "sweep"))
    return _run(request.composer, sweep, request.overrides, retry=True, changes=changes)


def _run(
    composer: Composer,
    sweep: Sweep,
    overrides: Sequence[str],
    *,
    retry: bool = False,
    changes: Sequence[str] = (),
) -> int:
    _check_permissions(composer, sweep, overrides)
    typed = [o for o in overrides if _is_launcher(o)] or _launcher_of(sweep)
    if sweep.sweeper == study.NAME and not retry:
        with _in_folder(sweep.working_dir):
            return study.go_on(composer, sweep, overrides, typed)
    launch = Launch.read(composer, typed)
    attempts = {str(t.number): len(t.errors) for t in sweep.having("failed")} if retry else None
    allow = [o for o in overrides if key_of(o) == "allow"]
    order = order_of(composer, sweep, allow, retry=retry, attempts=attempts, changes=tuple(changes))
    with _in_folder(sweep.working_dir):
        wanted = [t for t in sweep.trials if t.state != "running" and order.wants(t)]
        for trial in wanted:
            job_of(order, trial)  # what is wrong with the command is said before any starts
        if changes:
            change_trials(sweep.folder, [trial.number for trial in wanted], changes)
        print(f"{len(wanted)} of {len(sweep.trials)} trials in {sweep.folder}", flush=True)
        if retry and not wanted:
            print("no trial has failed: nothing to try again")
        code = run_trials(launch, sweep, order)
        if sweep.sweeper == study.NAME:
            study.tell(composer, sweep, overrides)
        return code


def _check_permissions(composer: Composer, sweep: Sweep, overrides: Sequence[str]) -> None:
    if sweep.sweeper not in ("basic", study.NAME):
        raise UserError(f"{sweep.folder}: a sweep of hydra/sweeper={sweep.sweeper}, unknown here")
    if sweep.config_dir and composer.config_dir is None:
        raise UserError(
            f"--config-dir: the sweep in {sweep.folder}\n"
            f"  was started with {sweep.config_dir}; give it again"
        )
    if sweep.allow and not any(key_of(o) == "allow" for o in overrides):
        raise UserError(
            f"allow: the sweep in {sweep.folder}\n"
            f"  was started with {' '.join(sweep.allow)}; give it again"
        )


def _launcher_of(sweep: Sweep) -> list[str]:
    """The launcher a sweep was started with, as far as it can do no harm."""
    own = [o for o in sweep.hydra if not study.is_own(o)]
    for override in own:
        if not _HARMLESS.fullmatch(override.lstrip("+")):
            raise UserError(
                f"hydra/launcher: the sweep was started with {' '.join(own)}\n"
                f"  give it again, or hydra/launcher={BASIC} to run the trials here"
            )
    return own


def _is_launcher(override: str) -> bool:
    return key_of(override).startswith(("hydra/launcher", "hydra.launcher"))


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Relative paths mean what they meant when the sweep was started."""
    before = Path.cwd()
    if not Path(folder).is_dir():
        print(f"{folder}, where it was started, is gone: relative paths start in {before}")
        folder = str(before)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
