"""Access to a study of Optuna: its storage, pruners and trials.

Without torch, for whoever checks settings.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import absolute

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}
PRUNED = "pruned.txt"
"""What the callback `Pruning` leaves in the folder of a run that it ended."""

# User attributes of Optuna's trial: which trial of which sweep it is.
SWEEP, NUMBER = "sweep", "number"


def is_url(storage: str) -> bool:
    """Whether it is a URL, for Optuna alone to read, or else the path of a journal."""
    return "://" in storage


def open_storage(storage: str, *, make: bool = False) -> "BaseStorage":
    """The storage of a study: a journal in a file, or what a URL of Optuna's names.

    Args:
        make: whether one may be begun.

    Raises:
        UserError: there is none, or Optuna can't use it.
    """
    import optuna
    from filelock import FileLock
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = absolute(storage)
    if not is_url(storage) and not make and not (file.is_file() and file.stat().st_size):
        raise UserError(f"no study in {file}")
    try:
        if is_url(storage):
            return RDBStorage(storage, skip_table_creation=not make)
        # Optuna's own locks stay for half a minute when their process is killed.
        lock = FileLock(file.with_name(f".{file.name}.write.lock"))
        return JournalStorage(JournalFileBackend(str(file), lock_obj=lock))  # type: ignore[arg-type]
    except Exception as error:
        raise UserError(f"Optuna can't use the storage {storage}: {first_line(error)}") from error


def load_study(storage: str, name: str, **kwargs: Any) -> "Study":
    """A study that is there.

    Raises:
        UserError: it is not, or its storage can't be reached.
    """
    import optuna

    opened = open_storage(storage)
    try:
        return optuna.load_study(study_name=name, storage=opened, **kwargs)
    except KeyError as error:
        raise UserError(f"no study {name} in {storage}") from error


def make_pruner(name: str, options: Mapping[str, Any] | None) -> "BasePruner":
    """One of Optuna's pruners."""
    from optuna import pruners

    return made("pruner", getattr(pruners, PRUNERS[name]), options or {})


def made(kind: str, make: Any, options: Mapping[str, Any]) -> Any:
    """A sampler or a pruner with these options."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        try:
            return make(**options)
        except (TypeError, ValueError) as error:
            raise UserError(f"hydra.sweeper.{kind}_options: {error}") from error


def find_trial(study: "Study", sweep: str, number: int) -> "FrozenTrial | None":
    """The study's newest trial for one of a sweep."""
    wanted = {SWEEP: sweep, NUMBER: number}
    trials = study.get_trials(deepcopy=False)
    found = [t for t in trials if all(t.user_attrs.get(k) == v for k, v in wanted.items())]
    return found[-1] if found else None
