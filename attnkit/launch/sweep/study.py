"""`-m hydra/sweeper=optuna`: a sweep whose trials Optuna chooses, by `ask` and `tell`.

Its trials have the folders, states and locks of every sweep, so that `-m resume=`, `run=retry` and
the table work in the same way. The folder of a trial holds its result. Whichever process chooses
the next trial first reports finished ones to the study, so that trials of a killed process are
continued and reported, too. Several sweeps may share a study in one storage.
"""

import os
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from attnkit.launch.command import command_line, key_of, literal, permission
from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import (
    SUBDIR,
    is_launcher,
    is_sweeper,
    split,
    trial_folder,
)
from attnkit.launch.sweep import search
from attnkit.launch.sweep.launchers import Launcher
from attnkit.launch.sweep.ranking import Metric
from attnkit.launch.sweep.record import Sweep, Trial, add_trial, new_trial, read_sweep
from attnkit.launch.sweep.report import best_command
from attnkit.launch.sweep.search import PREFIX, SAMPLERS, Settings
from attnkit.launch.sweep.trials import Order, checked, orders_of, run_trials
from attnkit.lightning import study as optunas
from attnkit.lightning.console import three_digits
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import write_text

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

NAME = "optuna"
BEST = "best.txt"
JOURNAL = "study.journal"
"""The default storage, in the folder of the sweep."""
CHANGEABLE = tuple(f"{PREFIX}{name}" for name in ("n_trials", "n_jobs", "storage"))
"""Settings that may change when a study is resumed."""

_CHECKPOINT = "callbacks.checkpoint"
# User attributes: the number of trials of the study, which any process may raise, and for a trial
# its sweep and its number there.
_LIMIT, _SWEEP, _NUMBER = "n_trials", "sweep", "number"
_ENDED = {"done": "COMPLETE", "failed": "FAIL", "pruned": "PRUNED"}
# How long another sweep may take to ask for a trial if it shares no lock with this one.
_ASKING = timedelta(minutes=10)


def is_chosen(words: Sequence[str]) -> bool:
    """Return whether Hydra's words choose a study.

    Raises:
        UserError: they choose another sweeper, or have settings of a sweeper that is not chosen.
    """
    chosen = any(word.lstrip("+") == f"hydra/sweeper={NAME}" for word in words)
    for word in filter(is_sweeper, words):
        known = word.lstrip("+") in ("hydra/sweeper=basic", f"hydra/sweeper={NAME}")
        if not known and not (chosen and key_of(word).startswith(PREFIX)):
            raise UserError(
                f"{word}: not supported; attnkit itself combines the values of key=a,b\n"
                "  hydra/sweeper=basic: all of them; optuna: a study, with hydra.sweeper.*"
            )
    return chosen


class Study:
    """A study of Optuna: the overrides that all trials share, and the search space.

    After `open`, it also maps Optuna's trials to those of the sweep.

    Args:
        composer: the composer that parses the overrides.
        words: Hydra's words.
        rest: the other overrides.
    """

    name = NAME

    def __init__(self, composer: Composer, words: Sequence[str], rest: Sequence[str]) -> None:
        self.composer, self.words = composer, list(words)
        self.settings = Settings.read(composer, words)
        parsed = composer.parse(rest)
        swept = [o for o in parsed if o.is_sweep_override()]
        self.keys = tuple(o.key_or_group for o in swept)
        self.space = search.distributions(swept)
        fixed = [o for o, p in zip(rest, parsed, strict=True) if p not in swept]
        self.allow = [o for o in fixed if key_of(o) == "allow"]
        self.fixed = [o for o in fixed if o not in self.allow]
        if self.settings.metric is not None:  # table and checkpoint use the study's metric, too
            modes = {"minimize": "min", "maximize": "max", None: "null"}
            mode = modes[self.settings.direction]
            self.fixed.append(f"{_CHECKPOINT}.monitor={self.settings.metric}")
            self.fixed.append(f"{_CHECKPOINT}.mode={mode}")
        self.at_once = self.settings.n_jobs
        self.first = [*self.overrides(search.corners(self.space)[0]), *self.allow]

    @classmethod
    def again(cls, composer: Composer, sweep: Sweep, words: Sequence[str] = ()) -> "Study":
        """Return the study of a recorded sweep, with the permissions and changes of this command.

        Args:
            composer: the composer of this command.
            sweep: the recorded sweep.
            words: Hydra's words in this command.
        """
        changes = [w for w in words if key_of(w) in CHANGEABLE]
        rest = [o for o in split(sweep.command)[0] if key_of(o) not in ("allow", "run_dir")]
        study = cls(composer, [*sweep.hydra, *changes], [*rest, *sweep.allow])
        study.check(sweep.folder, begins=False)
        # A file must not cause a storage to be created: one outside the sweep's folder must exist,
        # or be typed.
        typed = any("storage" in word for word in changes)
        study.open(sweep.folder, make=typed or study.settings.storage is None)
        return study

    def overrides(self, params: dict[str, Any]) -> list[str]:
        """Return the overrides of a trial with these values."""
        return [*self.fixed, *search.texts({key: params[key] for key in self.space})]

    def check(self, root: Path, *, begins: bool = True) -> list[Order]:
        """Check the study and trials at the ends of its space; return no orders, as none is chosen.

        Args:
            root: the folder of the sweep.
            begins: whether the storage is created if it does not exist.
        """
        for word in self.words:
            if key_of(word) == SUBDIR and "job.num" not in word:
                raise UserError(
                    f"{word}: a study may choose the same values twice\n"
                    "  with ${hydra.job.num} in it, each trial has a folder of its own"
                )
        for params in reversed(search.corners(self.space)):
            overrides = self.overrides(params)
            trial_folder(self.composer, self.words, overrides, 0)
            trial = new_trial(root, (), 0, overrides, "trial")
            job = checked(self.composer, trial, self.allow).job
        if job.config["run"] != "train":
            raise UserError(f"hydra/sweeper={NAME}: run={job.config['run']}; a study trains")
        self.metric = Metric.of(job.config)
        checkpoint = (job.config.get("callbacks") or {}).get("checkpoint") or {}
        if not checkpoint.get("monitor") or self.metric.monitor.startswith("test"):
            raise UserError(
                f"{_CHECKPOINT}.monitor: {checkpoint.get('monitor')}; "
                "a study needs a validation metric there"
            )
        if self.settings.pruner != "none" and len(job.runs) > 1:
            raise UserError(
                f"{PREFIX}pruner={self.settings.pruner}: works only if each trial is "
                "one run; leave out seeds and splits"
            )
        optunas.make_pruner(self.settings.pruner, self.settings.pruner_options)
        self._sampler(0)
        if begins and self.settings.storage is not None:
            optunas.open_storage(str(self.settings.storage), make=True)
        return []

    # --- Optuna's study ---

    def open(self, folder: Path, *, make: bool) -> None:
        """Load the study; with `make`, create it and its storage if necessary.

        Raises:
            UserError: the study belongs to another search, or does not exist.
        """
        self.folder, name = folder, self.settings.study_name
        self.storage = str(self.settings.storage or folder / JOURNAL)
        is_url = optunas.is_url(self.storage)
        path = Path(urlsplit(self.storage).path if is_url else self.storage)
        self.sweep = os.path.relpath(folder, path.parent)
        maximize = self.metric.maximize
        self.study = optunas.open_study(self.storage, name, make=make, maximize=maximize)
        with self.locked():
            self._check_same()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from using the study, if its storage is a journal. A database has
        no lock that all of its sweeps could hold."""
        if optunas.is_url(self.storage):
            yield
        else:
            with optunas.lock_of(self.storage):
                yield

    def _check_same(self) -> None:
        """Record the search in a new study; refuse the study of another search."""
        from optuna.distributions import distribution_to_json
        from optuna.study import StudyDirection

        name, theirs = self.settings.study_name, self.study.user_attrs
        is_other = (self.study.direction == StudyDirection.MAXIMIZE) != self.metric.maximize
        if is_other or (not theirs and self.study.get_trials(deepcopy=False)):
            raise UserError(
                f"hydra.sweeper.study_name={name}: this study has another direction, or was not "
                "created by attnkit"
            )
        mine = {
            "command": sorted(self.fixed),
            "monitor": self.metric.monitor,
            "space": {k: distribution_to_json(d) for k, d in self.space.items()},
        }
        for key, value in mine.items():
            if key not in theirs:
                self.study.set_user_attr(key, value)
            elif theirs[key] != value:
                raise UserError(
                    f"hydra.sweeper.study_name={name}: in {self.storage}\n"
                    f"  this study has another {key}: {' '.join(map(str, theirs[key]))[:200]}"
                )

    def _asked(self) -> dict[tuple[str, int], "FrozenTrial"]:
        """Return the study's trials by sweep and number; of a retried trial, the newest."""
        return {
            (t.user_attrs[_SWEEP], t.user_attrs[_NUMBER]): t
            for t in self.study.get_trials(deepcopy=False)
            if _NUMBER in t.user_attrs
        }

    def _limit(self) -> int:
        """Return the number of trials that the study shall have."""
        return self.study.user_attrs[_LIMIT]

    def _sampler(self, number: int) -> "BaseSampler":
        """Return a sampler for one trial, with a seed of its own.

        Several processes, and a process that continues after a crash, thus draw different numbers,
        while a study of one process is reproducible.
        """
        from optuna import samplers

        seed = self.settings.seed
        if self.settings.sampler != "qmc":  # qmc has one sequence for all trials
            seed = random.Random(f"{seed} {number}").getrandbits(32)
        options = {"seed": seed, **(self.settings.sampler_options or {})}
        return optunas.made("sampler", getattr(samplers, SAMPLERS[self.settings.sampler]), options)

    def _ask(self, number: int) -> dict[str, Any]:
        """Ask Optuna for the values of the sweep's next trial."""
        self.study.sampler = self._sampler(len(self._asked()))
        trial = self.study.ask(self.space)
        # Set last, so that a trial of a process that was killed here is recognised as orphaned.
        trial.set_user_attr(_SWEEP, self.sweep)
        trial.set_user_attr(_NUMBER, number)
        return trial.params

    def _settle(self, sweep: Sweep) -> None:
        """Report the results of the sweep's trials to the study, and fail orphaned trials."""
        from optuna.trial import TrialState, create_trial

        for begun in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            since = datetime.now() - (begun.datetime_start or datetime.now())
            is_other = optunas.is_url(self.storage) and since < _ASKING
            if _NUMBER not in begun.user_attrs and not is_other:
                self.study.tell(begun.number, state=TrialState.FAIL)
        asked = self._asked()
        for trial in sweep.trials:
            before = asked.get((self.sweep, trial.number))
            if trial.state not in _ENDED or before is None:
                continue
            state = TrialState[_ENDED[trial.state]]
            value = trial.results.get(self.metric.name)
            if state == TrialState.COMPLETE and value is None:
                state = TrialState.FAIL
            if before.state == TrialState.RUNNING:
                self.study.tell(
                    before.number, value if state == TrialState.COMPLETE else None, state
                )
            elif before.state != state:  # retried; a reported trial can't be changed
                self.study.add_trial(
                    create_trial(
                        state=state,
                        value=value,
                        params=before.params,
                        distributions=before.distributions,
                        user_attrs=before.user_attrs,
                        intermediate_values=before.intermediate_values,
                    )
                )

    def tell(self) -> None:
        """Report the results of the sweep's trials to the study, and show the best one."""
        with self.locked():
            self._settle(read_sweep(self.folder))
        self._show_best()

    # --- the sweep ---

    def begin(self, launcher: Launcher, sweep: Sweep, orders: Sequence[Order]) -> int:
        """Begin the study, or join the one in the storage, and return the exit code."""
        self.open(sweep.folder, make=True)
        return self.run(launcher, sweep, self.words)

    def run(self, launcher: Launcher, sweep: Sweep, words: Sequence[str]) -> int:
        """Run trials until there are enough, and return the exit code.

        Args:
            launcher: the launcher of the trials.
            sweep: the recorded sweep.
            words: Hydra's words in this command.
        """
        if _LIMIT not in self.study.user_attrs or f"{PREFIX}{_LIMIT}" in map(key_of, words):
            self.study.set_user_attr(_LIMIT, self.settings.n_trials)
        there, limit = len(self._asked()), self._limit()
        print(f"a study of {limit} trials in {self.folder}", flush=True)
        if limit < there:
            print(f"{PREFIX}n_trials={limit}: the study has {there} already; no more are chosen")
        chosen = [w for w in words if is_launcher(w)]
        kept = [w for w in sweep.hydra if not is_launcher(w)]
        sweep = replace(sweep, hydra=(*kept, *chosen))
        code = run_trials(launcher.run, sweep, self._batches())
        self.tell()
        return code

    def _batches(self) -> Iterator[list[Order]]:
        tried: set[int] = set()
        while trials := self._choose(tried):
            tried.update(trial.number for trial in trials)
            yield orders_of(self.composer, trials, self.allow, self._pruning)

    def _choose(self, tried: Collection[int]) -> list[Trial]:
        """Return the next trials: interrupted ones first, then new ones that Optuna chooses."""
        most = self.settings.n_jobs
        with self.locked():
            there = len(read_sweep(self.folder).trials)
            for (sweep, number), asked in sorted(self._asked().items()):
                if sweep == self.sweep and number >= there:  # killed before it was recorded
                    self._add(number, asked.params)
            known = read_sweep(self.folder)
            self._settle(known)
            unfinished = known.having("interrupted", "waiting")
            chosen = [trial for trial in unfinished if trial.number not in tried][:most]
            number = len(known.trials)
            while len(chosen) < most and len(self._asked()) < self._limit():
                chosen.append(self._add(number, self._ask(number)))
                number += 1
        return chosen

    def _add(self, number: int, params: dict[str, Any]) -> Trial:
        """Record a trial in sweep.json."""
        overrides = self.overrides(params)
        name = trial_folder(self.composer, self.words, overrides, number)
        return add_trial(self.folder, overrides, name)

    def _pruning(self, trial: Trial) -> dict[str, Any]:
        """Return the configuration of a trial's pruning callback, or an empty dict.

        It is empty without a pruner, or if the storage does not know the trial because the sweep
        was moved or another storage was given.
        """
        own = self.settings
        asked = self._asked().get((self.sweep, trial.number))
        if own.pruner == "none" or asked is None:
            return {}
        # relative for the default storage, so that the path stays valid if the sweep is moved
        storage = literal(self.storage) if own.storage else f"${{run_dir}}/../{JOURNAL}"
        node = {"_target_": "attnkit.lightning.Pruning", "folder": "${run_dir}", "storage": storage}
        node |= {"study": literal(own.study_name), "monitor": literal(self.metric.monitor)}
        node |= {"pruner": own.pruner, "options": own.pruner_options}
        return {**node, "trial": asked.number}

    def _show_best(self) -> None:
        """Print the study's best command line and write it to a file."""
        try:
            best = self.study.best_trial
        except ValueError:  # none is complete
            return
        allowed = permission(self.composer.config_dir, self.allow)
        line = command_line(*self.overrides(best.params), permission=allowed)
        write_text(self.folder / BEST, f"{line}\n")
        print(
            f"  best   {self.metric.monitor} {three_digits(best.values[0])}: {self.folder / BEST}"
        )
        if line != best_command(self.folder):  # the best trial belongs to another sweep
            print(f"the best run of the study:\n  {line}")
