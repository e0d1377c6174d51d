"""The storage of a study of Optuna, and its pruners.

It needs no torch, so that settings are checked fast.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import absolute

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage

PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}
PRUNED = "pruned.txt"
"""The file that the callback `Pruning` leaves in the folder of a run that it ended."""


def is_url(storage: str) -> bool:
    """Whether a storage is a URL, which only Optuna reads, or else the path of a journal."""
    return "://" in storage


def lock_of(journal: str | Path) -> "BaseFileLock":
    """Return the lock for writes to a journal; a process has only one, which it may take twice.

    Optuna's own locks stay for half a minute if their process is killed.
    """
    from filelock import FileLock

    file = absolute(str(journal))
    return FileLock(file.with_name(f".{file.name}.lock"), is_singleton=True)


def open_storage(storage: str, *, make: bool = False) -> "BaseStorage":
    """Return the storage of a study: a journal in a file, or the target of a URL of Optuna.

    Args:
        make: whether a missing one is created.

    Raises:
        UserError: it does not exist, or Optuna can't use it.
    """
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = absolute(storage)
    if not is_url(storage) and not make and not (file.is_file() and file.stat().st_size):
        raise UserError(f"no study in {file}")
    try:
        if is_url(storage):
            return RDBStorage(storage, skip_table_creation=not make)
        lock: Any = lock_of(file)
        return JournalStorage(JournalFileBackend(str(file), lock_obj=lock))
    except Exception as error:
        raise UserError(f"Optuna can't use the storage {storage}: {first_line(error)}") from error


def open_study(storage: str, name: str, *, make: bool = False, maximize: bool = False) -> "Study":
    """Return a study that prunes nothing by itself.

    Args:
        make: whether a missing one is created.
        maximize: whether more is better, if it is created.

    Raises:
        UserError: it does not exist, or its storage can't be reached.
    """
    import optuna

    opened, pruner = open_storage(storage, make=make), optuna.pruners.NopPruner()
    if make:
        return optuna.create_study(
            storage=opened,
            pruner=pruner,
            study_name=name,
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )
    try:
        return optuna.load_study(study_name=name, storage=opened, pruner=pruner)
    except KeyError as error:
        raise UserError(f"no study {name} in {storage}") from error


def make_pruner(name: str, options: Mapping[str, Any] | None) -> "BasePruner":
    """Return one of Optuna's pruners."""
    from optuna import pruners

    return made("pruner", getattr(pruners, PRUNERS[name]), options or {})


def made(kind: str, make: Any, options: Mapping[str, Any]) -> Any:
    """Return a sampler or a pruner with these options."""
    from optuna.exceptions import ExperimentalWarning

    warnings.simplefilter("ignore", ExperimentalWarning)  # also for its later steps
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"hydra.sweeper.{kind}_options: {error}") from error
