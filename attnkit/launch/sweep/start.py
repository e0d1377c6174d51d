"""A sweep: `-m key=a,b` begins it, `-m resume=DIR` goes on, `run=retry sweep=DIR` tries again.

Every trial is checked before the first one starts. The trials are on record in sweep.json before
that, so that whatever ends a sweep, it can go on. Permission to run code is not for a file to give:
what sweep.json says of `--config-dir`, `allow=` and commands of a launcher is asked for again.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from attnkit.launch import folder as folders
from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import SUBDIR, is_launcher, trial_folder
from attnkit.launch.decide import Request, check_resumable
from attnkit.launch.processes.locks import holder
from attnkit.launch.sweep.launchers import BASIC, Launch
from attnkit.launch.sweep.record import (
    Sweep,
    change_trials,
    find_sweep,
    held,
    new_trial,
    read_sweep,
)
from attnkit.launch.sweep.run_trials import begin, check_trial, order_of, run_trials
from attnkit.launch.sweep.study import loop as study
from attnkit.launch.sweep.trial import Order, job_of
from attnkit.lightning.errors import UserError

# Launchers, and how much they may take; nothing that is a command, a path or a text of its own.
_HARMLESS = re.compile(
    r"hydra/launcher=\w+|hydra\.launcher\.(n_jobs|timeout_min|cpus_per_task|gpus_per_node|mem_gb"
    r"|partition|qos|account|constraint|gpus_per_task|cpus_per_gpu|array_parallelism"
    r"|max_num_timeout|signal_delay_s)=[\w.+-]+"
)


def sweep(
    composer: Composer,
    overrides: Sequence[str],
    words: Sequence[str],
    begun: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Run one trial for each combination; returns the exit code, 1 if a trial failed.

    Args:
        words: Hydra's, as config/hydra_words.py has read them.
        begun: told the folder of the sweep, before its trials run.
    """
    parsed = composer.parse(overrides)
    if any(o.key_or_group == "resume" and o.value() is not None for o in parsed):
        return resume(composer, overrides, words, begun)
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group in ("run_dir", "allow"):
            raise UserError(f"{override.input_line}: must be the same for all trials")
    place = [o for o in overrides if key_of(o) == "run_dir"]
    rest = [o for o in overrides if o not in place]
    if study.is_chosen(words):
        return study.start(composer, rest, place, words, begun)
    launch = Launch.read(composer, words)
    combinations = _combinations(composer, rest)
    request = Request.read(composer, [*combinations[0], *place])
    root = request.folder(sweep=True)
    names: list[str | None] = []
    for number, combination in enumerate(combinations):
        check_trial(composer, combination, root)
        name = trial_folder(composer, words, combination, number)
        if name is not None and name in names:
            raise UserError(
                f"{SUBDIR}: trials {names.index(name)} and {number} would share the folder {name}\n"
                "  with ${hydra.job.num} in it, each has its own"
            )
        names.append(name)

    root = folders.create(root, fresh=request.config.get("run_dir") is None)
    keys = tuple(o.key_or_group for o in parsed if o.is_sweep_override())
    made = [[o for o in c if key_of(o) != "allow"] for c in combinations]
    trials = (new_trial(root, keys, n, made[n], name) for n, name in enumerate(names))
    begun(root)
    with held(root):
        planned = begin(composer, root, overrides, words, keys, trials=tuple(trials))
        print(f"{len(combinations)} trials in {root}", flush=True)
        order = order_of(composer, planned, planned.allow)
        return run_trials(launch, planned, order, [range(len(combinations))])


def resume(
    composer: Composer,
    overrides: Sequence[str],
    words: Sequence[str],
    begun: Callable[[Path], None],
) -> int:
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
    begun(sweep.folder)
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
    attempts = {str(trial.number): len(trial.errors) for trial in sweep.having("failed")}
    order = order_of(composer, sweep, allow, retry=True, attempts=attempts, changes=tuple(changes))
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


def _combinations(composer: Composer, overrides: Sequence[str]) -> list[list[str]]:
    """Each combination of the values, the last key changing first."""
    choices = []
    for override in composer.parse(overrides):
        if override.is_interval_sweep():
            raise UserError(
                f"{override.input_line}: this is a range, not a list of values\n"
                "  key=a,b or key=range(1,9); or let Optuna choose: hydra/sweeper=optuna"
            )
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    if not all(choices):
        raise UserError("-m: there are no trials: glob(…) matches no choice of its group")
    return [list(combination) for combination in product(*choices)]
