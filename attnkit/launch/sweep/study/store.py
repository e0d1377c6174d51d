"""The study of a sweep in its storage: Optuna's trials, and which of the sweep's each one is.

What has become of a trial its own folder tells (sweep/record.py); the study is brought up to date
from there, by whichever process comes next. So a process that was killed leaves nothing in the
study that stays running for ever: its trial is gone on with, and told when it ends.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from attnkit.launch.processes.locks import locked
from attnkit.launch.sweep.record import Sweep, Trial
from attnkit.launch.sweep.study.settings import SAMPLERS, Settings
from attnkit.lightning.callbacks.study import NUMBER, SWEEP, is_url, load_study, made, open_storage
from attnkit.lightning.errors import UserError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState

_LIMIT = "n_trials"  # of the study, since any process may raise it
_NONE = (None, None)
_ENDED = {"done": "COMPLETE", "failed": "FAIL", "pruned": "PRUNED"}
# How long another sweep may take to ask for a trial, where no lock is shared with it.
_ASKING = timedelta(minutes=10)


@dataclass
class Store:
    """The study of a sweep.

    Args:
        settings: of the study.
        folder: of the sweep.
        monitor: the metric; its best value is the trial's, as in the table.
        minimise: whether lower is better.
        space: a distribution for each searched key.
        identity: what trials of one study have in common.
    """

    settings: Settings
    folder: Path
    monitor: str
    minimise: bool
    space: dict[str, BaseDistribution]
    identity: Sequence[str]

    make: bool = True
    """Whether the study is begun where there is none."""

    def __post_init__(self) -> None:
        self.url = self.settings.url(self.folder)
        path = Path(urlsplit(self.url).path if is_url(self.url) else self.url)
        self.sweep = os.path.relpath(self.folder, path.parent)
        # A journal lies where all its sweeps can lock it; of a URL nobody knows.
        self.shares_lock = not is_url(self.url)
        self._lock = path.with_name(f".{path.name}.lock")
        if is_url(self.url):
            self._lock = self.folder / ".study.lock"
        with self.locked():
            self.study = self._open()
            self._check_same()

    def _open(self) -> Study:
        import optuna

        name = self.settings.study_name
        if not self.make:
            return load_study(self.url, name)
        return optuna.create_study(
            storage=open_storage(self.url, make=True),
            pruner=optuna.pruners.NopPruner(),
            study_name=name,
            direction="minimize" if self.minimise else "maximize",
            load_if_exists=True,
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process asks or tells meanwhile: of this sweep, or of any in this journal."""
        with locked(self._lock, wait=True):
            yield

    def _check_same(self) -> None:
        """UserError if the study was made for another search."""
        from optuna.distributions import distribution_to_json
        from optuna.study import StudyDirection

        name = self.settings.study_name
        mine = {
            "identity": list(self.identity),
            "monitor": self.monitor,
            "space": {k: distribution_to_json(d) for k, d in self.space.items()},
        }
        theirs = self.study.user_attrs
        minimises = self.study.direction == StudyDirection.MINIMIZE
        if (not theirs and self.study.get_trials(deepcopy=False)) or minimises != self.minimise:
            raise UserError(f"hydra.sweeper.study_name={name}: is a study of another kind")
        for key, value in mine.items():
            if theirs.get(key, value) != value:
                raise UserError(
                    f"hydra.sweeper.study_name={name}: in {self.url}\n"
                    f"  is a study with another {key if key != 'identity' else 'command'}: "
                    f"{' '.join(map(str, theirs[key]))[:200]}"
                )
            if key not in theirs:
                self.study.set_user_attr(key, value)

    # --- what there is ---

    def of_sweep(self) -> dict[int, FrozenTrial]:
        """The study's trials of this sweep by number, of each the newest."""
        return {
            t.user_attrs[NUMBER]: t
            for t in self.study.get_trials(deepcopy=False)
            if t.user_attrs.get(SWEEP) == self.sweep
        }

    def asked(self) -> int:
        """The number of trials in the study, of all sweeps; a retried trial counts once."""
        trials = self.study.get_trials(deepcopy=False)
        return len({(t.user_attrs.get(SWEEP), t.user_attrs.get(NUMBER)) for t in trials} - {_NONE})

    def limit(self, number: int = 0, *, typed: bool = False) -> int:
        """How many trials the study is to have; `number` counts where it was typed, or none is."""
        known = self.study.user_attrs.get(_LIMIT)
        if number and (typed or known is None):
            self.study.set_user_attr(_LIMIT, number)
            return number
        return known or 0

    def best(self) -> FrozenTrial | None:
        """The trial with the best value, if one is complete."""
        try:
            return self.study.best_trial
        except ValueError:
            return None

    # --- asking and telling, under the lock ---

    def ask(self, number: int) -> dict[str, Any]:
        """What the next trial of the sweep has for values."""
        from optuna.exceptions import ExperimentalWarning

        self.study.sampler = make_sampler(self.settings, self.asked())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            trial = self.study.ask(self.space)
        params = {key: trial.params[key] for key in self.space}
        # Last: without them, what a killed process has begun to ask for is nobody's.
        trial.set_user_attr(SWEEP, self.sweep)
        trial.set_user_attr(NUMBER, number)
        return params

    def settle(self, sweep: Sweep) -> None:
        """Tell the study what has become of the trials of the sweep."""
        from optuna.trial import TrialState

        known = self.of_sweep()
        for begun in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            asked = begun.datetime_start or datetime.now()
            if NUMBER not in begun.user_attrs and (
                self.shares_lock or datetime.now() - asked > _ASKING
            ):
                self.study.tell(begun.number, state=TrialState.FAIL)
        for trial in sweep.trials:
            mine = known.get(trial.number)
            if trial.state not in _ENDED or mine is None:
                continue
            state = TrialState[_ENDED[trial.state]]
            value = self.value(trial)
            if state == TrialState.COMPLETE and value is None:
                state = TrialState.FAIL
            if mine.state == TrialState.RUNNING:
                values = value if state == TrialState.COMPLETE else None
                self.study.tell(mine.number, values, state)
            elif mine.state != state:  # tried again: what is told is told
                self._add(mine, state, value)

    def _add(self, before: FrozenTrial, state: TrialState, value: float | None) -> None:
        from optuna.trial import TrialState, create_trial

        if state == TrialState.PRUNED:
            value = before.intermediate_values.get(max(before.intermediate_values, default=-1))
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

    def value(self, trial: Trial) -> float | None:
        """The best value of the metric of a trial that is done."""
        return trial.results.get(f"{self.monitor}_best")


def make_sampler(settings: Settings, number: int) -> BaseSampler:
    """A sampler for one trial, with a seed of its own.

    So several processes, and one that goes on after a crash, draw different numbers, and a study of
    one process is the same every time.
    """
    from optuna import samplers

    seed = settings.seed
    if settings.sampler != "qmc":  # whose sequence is one for all trials
        seed = random.Random(f"{seed} {number}").getrandbits(32)
    make = getattr(samplers, SAMPLERS[settings.sampler])
    return made("sampler", make, {"seed": seed, **(settings.sampler_options or {})})
