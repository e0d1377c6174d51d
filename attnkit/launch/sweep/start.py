"""Starts sweeps: `-m key=a,b` a new one, `-m resume=DIR` the rest, `run=retry sweep=DIR` failures.

Every trial is checked before the first one starts. The trials are recorded in sweep.json before
that, so that a sweep can be resumed whatever ends it. A file must not give permission to run code:
`--config-dir`, `allow=` and commands of a launcher must be typed again, whatever sweep.json holds.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

from attnkit.launch import folder as folders
from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import SUBDIR, is_launcher, trial_folder
from attnkit.launch.decide import Request, check_resumable
from attnkit.launch.processes.locks import holder
from attnkit.launch.sweep.launchers import BASIC, Launcher, read_launcher
from attnkit.launch.sweep.record import (
    Sweep,
    Trial,
    change_trials,
    find_sweep,
    held,
    new_trial,
    read_sweep,
    write_sweep,
)
from attnkit.launch.sweep.study import CHANGEABLE, Study, is_chosen
from attnkit.launch.sweep.trials import Order, checked, orders_of, run_trials
from attnkit.lightning.errors import UserError

# Settings of launchers that choose amounts and names, but no command, path or free text.
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
    """Run one trial for each combination, and return the exit code, which is 1 if a trial failed.

    Args:
        composer: the composer that parses the overrides.
        overrides: the overrides of the command line.
        words: Hydra's words, as config/hydra_words.py returns them.
        begun: called with the folder of the sweep before its trials run.
    """
    parsed = composer.parse(overrides)
    if any(o.key_or_group == "resume" and o.value() is not None for o in parsed):
        return resume(composer, overrides, words, begun)
    for override in parsed:
        if override.is_sweep_override() and override.key_or_group in ("run_dir", "allow"):
            raise UserError(f"{override.input_line}: must be the same for all trials")
    place = [o for o in overrides if key_of(o) == "run_dir"]
    rest = [o for o in overrides if o not in place]
    plan = (Study if is_chosen(words) else _Grid)(composer, words, rest)
    launcher = read_launcher(composer, words, plan.at_once)
    request = Request.read(composer, [*plan.first, *place])
    root = request.folder(sweep=True)
    orders = plan.check(root)
    made = folders.create(root, fresh=request.config.get("run_dir") is None)
    if made != root:  # another command took the name in the meantime
        orders = plan.check(made)
    begun(made)
    with held(made):
        planned = Sweep(
            made,
            (*overrides, *words),
            plan.keys,
            tuple(order.trial for order in orders),
            plan.name,
            hydra=tuple(words),
            config_dir=str(composer.config_dir) if composer.config_dir else None,
            allow=tuple(plan.allow),
            working_dir=str(Path.cwd()),
        )
        write_sweep(planned)
        return plan.begin(launcher, planned, orders)


class _Grid:
    """A trial for each combination of the values.

    Args:
        composer: the composer that parses the overrides.
        words: Hydra's words.
        rest: the other overrides.
    """

    name = "basic"
    at_once = 1

    def __init__(self, composer: Composer, words: Sequence[str], rest: Sequence[str]) -> None:
        self.composer, self.words = composer, words
        self.combinations = _combinations(composer, rest)
        self.first = self.combinations[0]
        parsed = composer.parse(rest)
        self.keys = tuple(o.key_or_group for o in parsed if o.is_sweep_override())
        self.allow = [o for o in rest if key_of(o) == "allow"]

    def check(self, root: Path) -> list[Order]:
        """Return the orders of all trials of a sweep in this folder, each of them checked."""
        orders: list[Order] = []
        places: dict[Path, int] = {}
        for number, combination in enumerate(self.combinations):
            name = trial_folder(self.composer, self.words, combination, number)
            own = [o for o in combination if key_of(o) != "allow"]
            trial = new_trial(root, self.keys, number, own, name)
            orders.append(checked(self.composer, trial, self.allow))
            if (other := places.setdefault(trial.folder, number)) != number:
                raise UserError(
                    f"{SUBDIR}: trials {other} and {number} would share the folder {name}\n"
                    "  with ${hydra.job.num} in it, each has its own"
                )
        return orders

    def begin(self, launcher: Launcher, sweep: Sweep, orders: Sequence[Order]) -> int:
        """Run the trials and return the exit code."""
        print(f"{len(orders)} trials in {sweep.folder}", flush=True)
        return run_trials(launcher.run, sweep, [orders])


def resume(
    composer: Composer,
    overrides: Sequence[str],
    words: Sequence[str],
    begun: Callable[[Path], None],
) -> int:
    """Run the trials of a sweep that have not ended, and return the exit code."""
    (given,) = [o for o in composer.parse(overrides) if o.key_or_group == "resume"][-1:]
    if given.is_sweep_override():
        raise UserError(f"{given.input_line}: one sweep at a time")
    sweep = read_sweep(find_sweep(given.value(), "resume"))
    is_study = sweep.sweeper == Study.name
    for override in (*overrides, *words):
        if key_of(override) in ("resume", "allow") or is_launcher(override):
            continue
        if not (is_study and key_of(override) in CHANGEABLE):
            more = "; n_trials, n_jobs and storage of hydra.sweeper" if is_study else ""
            raise UserError(
                f"{override}: can't be changed when a sweep is resumed\n"
                f"  can be changed: hydra/launcher and its settings{more}"
            )
    sweep = _permitted(composer, sweep, overrides)
    chosen = [w for w in words if is_launcher(w)] or _launcher_of(sweep)
    begun(sweep.folder)
    with held(sweep.folder, "resume"), _in_folder(sweep.working_dir):
        if is_study:
            study = Study.again(composer, sweep, words)
            launcher = read_launcher(composer, chosen, study.at_once)
            return study.run(launcher, sweep, [*chosen, *words])
        unfinished = sweep.having("interrupted", "waiting")
        return _run(composer, read_launcher(composer, chosen), sweep, unfinished)


def retry(request: Request, launcher: object = None) -> int:
    """Carry out `run=retry sweep=DIR`: run failed trials again, and return the exit code."""
    changes = [o for o in request.overrides if key_of(o) not in ("run", "sweep", "allow")]
    check_resumable(changes)
    composer = request.composer
    sweep = read_sweep(find_sweep(request.config.get("sweep"), "sweep"))
    sweep = _permitted(composer, sweep, request.overrides)
    chosen = read_launcher(composer, request.words or _launcher_of(sweep))
    with held(sweep.folder, "sweep"), _in_folder(sweep.working_dir):
        failed = sweep.having("failed")
        code = _run(composer, chosen, sweep, failed, changes)
        if not failed:
            print("no trial has failed: nothing to try again")
        if sweep.sweeper == Study.name:
            Study.again(composer, sweep).tell()
        return code


def _run(
    composer: Composer,
    launcher: Launcher,
    sweep: Sweep,
    wanted: Sequence[Trial],
    changes: Sequence[str] = (),
) -> int:
    if changes:  # a wrong change is an error of the command, not of the trials
        orders = [Order.of(composer, trial, [*changes, *sweep.allow]) for trial in wanted]
        change_trials(sweep.folder, [trial.number for trial in wanted], changes)
    else:
        orders = orders_of(composer, wanted, sweep.allow)
    for trial in sweep.having("running"):
        print(f"trial {trial.number} is run by {holder(trial.lock)}")
    print(f"{len(wanted)} of {len(sweep.trials)} trials in {sweep.folder}", flush=True)
    return run_trials(launcher.run, sweep, [orders])


def _permitted(composer: Composer, sweep: Sweep, overrides: Sequence[str]) -> Sweep:
    """Return the sweep with the permissions of this command; refuse fewer than at its start."""
    allow = tuple(o for o in overrides if key_of(o) == "allow")
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
    config_dir = str(composer.config_dir) if composer.config_dir else None
    return replace(sweep, config_dir=config_dir, allow=allow)


def _launcher_of(sweep: Sweep) -> list[str]:
    """Return the words of the launcher that a sweep was started with; refuse unsafe settings."""
    own = [word for word in sweep.hydra if is_launcher(word)]
    if not all(_HARMLESS.fullmatch(word.lstrip("+")) for word in own):
        raise UserError(
            f"hydra/launcher: the sweep was started with {' '.join(own)}\n"
            f"  give it again, or hydra/launcher={BASIC} to run the trials here"
        )
    return own


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Change to the folder in which the sweep was started, so that relative paths stay valid."""
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
    """Return each combination of the values, the last key changing fastest."""
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
