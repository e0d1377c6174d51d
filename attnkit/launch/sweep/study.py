"""`-m hydra/sweeper=optuna`: a sweep whose trials Optuna chooses, by `ask` and `tell`.

Its trials are the sweep's: same folders, states and locks, so that `-m resume=`, `run=retry` and
the table are those of every sweep. What has become of a trial its folder says; the study is told
before the next one is chosen, by whichever process does that. So what a killed process has begun
is gone on with, and told when it ends. Sweeps of their own may share a study in one storage.
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
from attnkit.lightning.console import three_digits
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import write_text
from attnkit.lightning.studies import study as optunas

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

NAME = "optuna"
BEST = "best.txt"
JOURNAL = "study.journal"
"""The default storage, in the folder of the sweep."""
CHANGEABLE = tuple(f"{PREFIX}{name}" for name in ("n_trials", "n_jobs", "storage"))
"""Settings that may change in a study that goes on."""

_CHECKPOINT = "callbacks.checkpoint"
# User attributes of the study: how many trials it is to have, for any process may raise it; and of
# a trial: of which sweep it is which one.
_LIMIT, _SWEEP, _NUMBER = "n_trials", "sweep", "number"
_ENDED = {"done": "COMPLETE", "failed": "FAIL", "pruned": "PRUNED"}
# How long another sweep may take to ask for a trial, where no lock is shared with it.
_ASKING = timedelta(minutes=10)


def is_chosen(words: Sequence[str]) -> bool:
    """Whether Hydra's words choose a study.

    Raises:
        UserError: they choose another sweeper, or set something of one that is not chosen.
    """
    chosen = any(word.lstrip("+") == f"hydra/sweeper={NAME}" for word in words)
    for word in filter(is_sweeper, words):
        known = word.lstrip("+") in ("hydra/sweeper=basic", f"hydra/sweeper={NAME}")
        if not known and not (chosen and key_of(word).startswith(PREFIX)):
            raise UserError(
                f"{word}: attnkit makes the combinations itself, of key=a,b\n"
                "  hydra/sweeper=basic: all of them; optuna: a study, with hydra.sweeper.*"
            )
    return chosen


class Study:
    """A study: a command line taken apart into what trials share and what is searched; once it
    is opened, Optuna's trials, and which one of the sweep's each of them is.

    Args:
        words: Hydra's.
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
        if self.settings.metric is not None:  # so that table, checkpoint and study agree
            modes = {"minimize": "min", "maximize": "max", None: "null"}
            mode = modes[self.settings.direction]
            self.fixed.append(f"{_CHECKPOINT}.monitor={self.settings.metric}")
            self.fixed.append(f"{_CHECKPOINT}.mode={mode}")
        self.at_once = self.settings.n_jobs
        self.first = [*self.overrides(search.corners(self.space)[0]), *self.allow]

    @classmethod
    def again(cls, composer: Composer, sweep: Sweep, words: Sequence[str] = ()) -> "Study":
        """The study of a command as it was typed, with what is permitted and changed by this one.

        Args:
            words: Hydra's of this command.
        """
        changes = [w for w in words if key_of(w) in CHANGEABLE]
        rest = [o for o in split(sweep.command)[0] if key_of(o) not in ("allow", "run_dir")]
        study = cls(composer, [*sweep.hydra, *changes], [*rest, *sweep.allow])
        study.check(sweep.folder, begins=False)
        # No file may have a storage made: one that is elsewhere has to be there, or typed.
        typed = any("storage" in word for word in changes)
        study.open(sweep.folder, make=typed or study.settings.storage is None)
        return study

    def overrides(self, params: dict[str, Any]) -> list[str]:
        """Of a trial."""
        return [*self.fixed, *search.texts({key: params[key] for key in self.space})]

    def check(self, root: Path, *, begins: bool = True) -> list[Order]:
        """No trial is chosen yet; what is wrong at the ends of the space is an error now.

        Args:
            root: the folder of the sweep.
            begins: whether the study is made where there is none.
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
        """Load the study, or `make` it, with its storage.

        Raises:
            UserError: it was made for another search, or it is not there.
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
        """No other process asks or tells meanwhile, if the storage is a journal: a database has no
        lock that all of its sweeps could hold."""
        if optunas.is_url(self.storage):
            yield
        else:
            with optunas.lock_of(self.storage):
                yield

    def _check_same(self) -> None:
        from optuna.distributions import distribution_to_json
        from optuna.study import StudyDirection

        name, theirs = self.settings.study_name, self.study.user_attrs
        is_other = (self.study.direction == StudyDirection.MAXIMIZE) != self.metric.maximize
        if is_other or (not theirs and self.study.get_trials(deepcopy=False)):
            raise UserError(f"hydra.sweeper.study_name={name}: is a study of another kind")
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
                    f"  is a study with another {key}: {' '.join(map(str, theirs[key]))[:200]}"
                )

    def _asked(self) -> dict[tuple[str, int], "FrozenTrial"]:
        """The study's trials by sweep and number, of each the newest, for one may be retried."""
        return {
            (t.user_attrs[_SWEEP], t.user_attrs[_NUMBER]): t
            for t in self.study.get_trials(deepcopy=False)
            if _NUMBER in t.user_attrs
        }

    def _limit(self) -> int:
        """How many trials the study is to have."""
        return self.study.user_attrs[_LIMIT]

    def _sampler(self, number: int) -> "BaseSampler":
        """A sampler for one trial, with a seed of its own.

        So several processes, and one that goes on after a crash, draw different numbers, and a
        study of one process is the same every time.
        """
        from optuna import samplers

        seed = self.settings.seed
        if self.settings.sampler != "qmc":  # whose sequence is one for all trials
            seed = random.Random(f"{seed} {number}").getrandbits(32)
        options = {"seed": seed, **(self.settings.sampler_options or {})}
        return optunas.made("sampler", getattr(samplers, SAMPLERS[self.settings.sampler]), options)

    def _ask(self, number: int) -> dict[str, Any]:
        """What the next trial of the sweep has for values."""
        self.study.sampler = self._sampler(len(self._asked()))
        trial = self.study.ask(self.space)
        # Last: without them, what a killed process has begun to ask for is nobody's.
        trial.set_user_attr(_SWEEP, self.sweep)
        trial.set_user_attr(_NUMBER, number)
        return trial.params

    def _settle(self, sweep: Sweep) -> None:
        """Tell the study what has become of the trials of the sweep."""
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
            elif before.state != state:  # tried again: what is told is told
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
        """Tell the study what has become of the trials of the sweep, and show what is best."""
        with self.locked():
            self._settle(read_sweep(self.folder))
        self._show_best()

    # --- the sweep ---

    def begin(self, launcher: Launcher, sweep: Sweep, orders: Sequence[Order]) -> int:
        """Begin the study, or join the one that the storage holds; returns the exit code."""
        self.open(sweep.folder, make=True)
        return self.run(launcher, sweep, self.words)

    def run(self, launcher: Launcher, sweep: Sweep, words: Sequence[str]) -> int:
        """Run trials until there are enough; returns the exit code.

        Args:
            words: Hydra's of this command.
        """
        if _LIMIT not in self.study.user_attrs or f"{PREFIX}{_LIMIT}" in map(key_of, words):
            self.study.set_user_attr(_LIMIT, self.settings.n_trials)
        there, limit = len(self._asked()), self._limit()
        print(f"a study of {limit} trials in {self.folder}", flush=True)
        if limit < there:
            print(f"{PREFIX}n_trials={limit}: it has {there} already; no further one is chosen")
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
        """Trials that were broken off, then those that Optuna chooses."""
        most = self.settings.n_jobs
        with self.locked():
            there = len(read_sweep(self.folder).trials)
            for (sweep, number), asked in sorted(self._asked().items()):
                if sweep == self.sweep and number >= there:  # killed before it was written down
                    self._add(number, asked.params)
            known = read_sweep(self.folder)
            self._settle(known)
            broken_off = known.having("interrupted", "waiting")
            chosen = [trial for trial in broken_off if trial.number not in tried][:most]
            number = len(known.trials)
            while len(chosen) < most and len(self._asked()) < self._limit():
                chosen.append(self._add(number, self._ask(number)))
                number += 1
        return chosen

    def _add(self, number: int, params: dict[str, Any]) -> Trial:
        """Put a trial on record."""
        overrides = self.overrides(params)
        name = trial_folder(self.composer, self.words, overrides, number)
        return add_trial(self.folder, overrides, name)

    def _pruning(self, trial: Trial) -> dict[str, Any]:
        """The callback that reports the trial; none without a pruner, or where the storage does
        not know the trial: it was moved, or another storage was given."""
        own = self.settings
        asked = self._asked().get((self.sweep, trial.number))
        if own.pruner == "none" or asked is None:
            return {}
        # In the sweep's folder it stays where it is when the sweep is moved.
        storage = literal(self.storage) if own.storage else f"${{run_dir}}/../{JOURNAL}"
        node = {"_target_": "attnkit.lightning.Pruning", "folder": "${run_dir}", "storage": storage}
        node |= {"study": literal(own.study_name), "monitor": literal(self.metric.monitor)}
        node |= {"pruner": own.pruner, "options": own.pruner_options}
        return {**node, "trial": asked.number}

    def _show_best(self) -> None:
        """The best command line of the study, on screen and in a file."""
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
        if line != best_command(self.folder):  # that of another sweep in the same study
            print(f"the best run of the study:\n  {line}")
