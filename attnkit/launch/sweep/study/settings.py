"""`hydra.sweeper.*` of `hydra/sweeper=optuna`: read and checked without Optuna or torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from attnkit.launch.config import annotations, signatures
from attnkit.launch.config.compose import Composer
from attnkit.launch.sweep.record import key_of
from attnkit.lightning.errors import UserError
from attnkit.lightning.files import absolute

SWEEPER = "hydra/sweeper"
PREFIX = "hydra.sweeper."
JOURNAL = "study.journal"
"""The default storage, in the folder of the sweep."""

SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
}
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}
_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Settings:
    """What a study does; the fields are the settings."""

    n_trials: int = 20
    """Of the whole study, whoever runs them; those that fail or are pruned count."""
    n_jobs: int = 1
    """How many are given to the launcher at once."""
    metric: str | None = None
    """Of validation; default: what callbacks.checkpoint monitors."""
    direction: Literal["minimize", "maximize"] | None = None
    sampler: Literal["tpe", "random", "gp", "cmaes", "qmc"] = "tpe"
    sampler_options: dict[str, Any] | None = None
    """Arguments of Optuna's class."""
    pruner: Literal[
        "none", "median", "percentile", "successive_halving", "hyperband", "threshold"
    ] = "none"
    pruner_options: dict[str, Any] | None = None
    seed: int = 0
    """Of the sampler."""
    storage: str | Path | None = None
    """A file (a journal) or sqlite:///FILE; default: a journal in the folder of the sweep."""
    study_name: str = "attnkit"
    """Among the studies of a storage."""

    @classmethod
    def read(cls, composer: Composer, overrides: Sequence[str]) -> "Settings":
        """The settings among Hydra's overrides.

        Raises:
            UserError: one is wrong, or what it needs is not installed.
        """
        if find_spec("optuna") is None:
            raise UserError(
                "hydra/sweeper=optuna: its package is not installed\n"
                "  pip install 'attnkit[optuna]'"
            )
        given: dict[str, Any] = {}
        for override in composer.parse([o for o in overrides if key_of(o).startswith(PREFIX)]):
            line = str(override.input_line)
            if override.is_sweep_override() or override.is_delete():
                raise UserError(f"{line}: expected one value")
            name, _, inner = override.key_or_group.removeprefix(PREFIX).partition(".")
            if inner:
                if not name.endswith("_options"):
                    raise UserError(f"{line}: {PREFIX}{name} has no settings; {name}_options has")
                given.setdefault(name, {})[inner] = override.value()
            else:
                given[name] = override.value()
        check("", given, f"{__name__}.Settings")
        settings = cls(**given)
        settings._check()
        return settings

    def _check(self) -> None:
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"{PREFIX}{name}: expected at least {least}, got {getattr(self, name)}"
                )
        if (self.metric is None) != (self.direction is None):
            raise UserError(f"{PREFIX}metric and {PREFIX}direction: the one needs the other")
        if self.metric is not None and re.match(r"test\b", self.metric):
            raise UserError(f"{PREFIX}metric={self.metric}: to choose by the test would spoil it")
        if not self.study_name:
            raise UserError(f"{PREFIX}study_name: expected a name")
        if self.sampler == "cmaes" and find_spec("cmaes") is None:
            raise UserError(f"{PREFIX}sampler=cmaes: needs a package of its own: pip install cmaes")
        check("sampler_options.", self.sampler_options or {}, sampler_target(self.sampler))
        check("pruner_options.", self.pruner_options or {}, pruner_target(self.pruner))
        self.file(Path())

    def file(self, folder: Path) -> Path:
        """The file of the storage, of a sweep in this folder."""
        if self.storage is None:
            return folder / JOURNAL
        text = str(self.storage)
        name = text.removeprefix(_SQLITE)
        if "://" in name or re.match(r"\w\w+:/", name) or not name.strip():
            raise UserError(
                f"{PREFIX}storage={text}: expected a file for a journal, or {_SQLITE}FILE"
            )
        path = absolute(name)
        if path.is_dir() or not path.parent.is_dir():
            raise UserError(f"{PREFIX}storage: {path} can't be a file: its folder must exist")
        return path

    @property
    def is_sqlite(self) -> bool:
        """Whether the storage is a database."""
        return str(self.storage or "").startswith(_SQLITE)

    def url(self, folder: Path) -> str:
        """The storage with an absolute path."""
        return f"{_SQLITE if self.is_sqlite else ''}{self.file(folder)}"


def sampler_target(name: str) -> str:
    """Optuna's class for a sampler."""
    return f"optuna.samplers.{SAMPLERS[name]}"


def pruner_target(name: str) -> str:
    """Optuna's class for a pruner."""
    return f"optuna.pruners.{PRUNERS[name]}"


def check(prefix: str, given: Mapping[str, Any], target: str) -> None:
    """Settings against what takes them."""
    signature = signatures.signature_of(target)
    if signature is None:
        return
    for name, value in given.items():
        parameter = signature.parameters.get(name)
        if parameter is None:
            known = sorted(signature.parameters)
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"{PREFIX}{prefix}{name}: there is no such setting{hint}\n  {', '.join(known)}"
            )
        if not annotations.accepts(parameter, value):
            close = get_close_matches(str(value), annotations.choices(parameter), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            said = annotations.expected(parameter)
            raise UserError(f"{PREFIX}{prefix}{name}: expected {said}, got {value!r}{hint}")
    missing = [n for n, p in signature.parameters.items() if p.required and n not in given]
    if missing:
        raise UserError(f"{PREFIX}{prefix}{missing[0]}: missing: {target} needs it")
