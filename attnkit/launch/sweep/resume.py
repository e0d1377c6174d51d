"""A sweep once more: `-m resume=DIR` goes on with it, `run=retry sweep=DIR` runs what failed.

Permission to run code is not for a file to give, so what sweep.json says of `--config-dir`,
`allow=` and commands of a launcher is asked for, not taken over.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import is_launcher
from attnkit.launch.job.request import Request, check_resumable
from attnkit.launch.processes.locks import holder
from attnkit.launch.sweep.launchers import BASIC, Launch
from attnkit.launch.sweep.record import Sweep, change_trials, find_sweep, held, read_sweep
from attnkit.launch.sweep.run_trials import order_of, run_trials
from attnkit.launch.sweep.study import loop as study
from attnkit.launch.sweep.trial import Order, job_of
from attnkit.lightning.errors import UserError

# Launchers, and how much they may take; nothing that is a command, a path or a text of its own.
_HARMLESS = re.compile(
    r"hydra/launcher=\w+|hydra\.launcher\.(n_jobs|timeout_min|cpus_per_task|gpus_per_node|mem_gb"
    r"|partition|qos|account|constraint|gpus_per_task|cpus_per_gpu|array_parallelism"
    r"|max_num_timeout|signal_delay_s)=[\w.+-]+"
)


def resume(composer: Composer, overrides: Sequence[str], words: Sequence[str]) -> int:
    """Run the trials of a sweep that have not ended; returns the exit code."""
    (given,) = [o for o in composer.parse(overrides) if o.key_or_group == "resume"][-1:]
    if given.is_sweep_override():
        raise UserError(f"{given.input_line}: one sweep at a time")
    sweep = read_sweep(find_sweep(given.value(), "resume"))
    is_study = sweep.sweeper == study.NAME
    for override in (*overrides, *words):
        if key_of(override) in ("resume", "allow") or is_launcher(override):
            continue
        if not (is_study and study.is_changeable(override)):
            more = "; n_trials, n_jobs and storage of hydra.sweeper" if is_study else ""
            raise UserError(
                f"{override}: can't be changed when a sweep is resumed\n"
                f"  can be changed: hydra/launcher and its settings{more}"
            )
    allow = [o for o in overrides if key_of(o) == "allow"]
    _check_permissions(composer, sweep, allow)
    launcher = [w for w in words if is_launcher(w)] or _launcher_of(sweep)
    with held(sweep.folder, "resume"), _in_folder(sweep.working_dir):
        if is_study:
            return study.go_on(composer, sweep, allow, [*launcher, *words])
        order = order_of(composer, sweep, allow)
        unfinished = [t.number for t in sweep.trials if t.state != "running" and order.wants(t)]
        return _run(Launch.read(composer, launcher), sweep, order, unfinished)


def retry(request: Request, launcher: object = None) -> int:
    """`run=retry sweep=DIR`: run the failed trials of a sweep again; returns the exit code."""
    changes = [o for o in request.overrides if key_of(o) not in ("run", "sweep", "allow")]
    check_resumable(changes)
    sweep = read_sweep(find_sweep(request.config.get("sweep"), "sweep"))
    composer = request.composer
    allow = [o for o in request.overrides if key_of(o) == "allow"]
    _check_permissions(composer, sweep, allow)
    launch = Launch.read(composer, request.words or _launcher_of(sweep))
    failed = [trial.number for trial in sweep.having("failed")]
    order = order_of(composer, sweep, allow, retry=True, changes=tuple(changes))
    with held(sweep.folder, "sweep"), _in_folder(sweep.working_dir):
        code = _run(launch, sweep, order, failed)
        if not failed:
            print("no trial has failed: nothing to try again")
        if sweep.sweeper == study.NAME:
            study.tell(composer, sweep, allow)
        return code


def _run(launch: Launch, sweep: Sweep, order: Order, wanted: Sequence[int]) -> int:
    for number in wanted:
        job_of(order, sweep.trials[number])  # what is wrong with the command is said before any
    if order.changes:
        change_trials(sweep.folder, wanted, order.changes)
    for trial in sweep.having("running"):
        print(f"trial {trial.number} is run by {holder(trial.lock)}")
    print(f"{len(wanted)} of {len(sweep.trials)} trials in {sweep.folder}", flush=True)
    return run_trials(launch, sweep, order, [wanted])


def _check_permissions(composer: Composer, sweep: Sweep, allow: Sequence[str]) -> None:
    if sweep.config_dir and composer.config_dir is None:
        raise UserError(
            f"--config-dir: the sweep in {sweep.folder}\n"
            f"  was started with {sweep.config_dir}; give it again"
        )
    if sweep.allow and not allow:
        raise UserError(
            f"allow: the sweep in {sweep.folder}\n"
            f"  was started with {' '.join(sweep.allow)}; give it again"
        )


def _launcher_of(sweep: Sweep) -> list[str]:
    """The launcher a sweep was started with, as far as it can do no harm."""
    own = [word for word in sweep.hydra if is_launcher(word)]
    if not all(_HARMLESS.fullmatch(word.lstrip("+")) for word in own):
        raise UserError(
            f"hydra/launcher: the sweep was started with {' '.join(own)}\n"
            f"  give it again, or hydra/launcher={BASIC} to run the trials here"
        )
    return own


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
