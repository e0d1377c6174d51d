"""`hydra.sweeper.*` of `hydra/sweeper=optuna`: read and checked without Optuna or torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from attnkit.launch.config.compose import Composer
from attnkit.launch.config.hydra_words import settings
from attnkit.launch.config.sources import Origins
from attnkit.launch.config.validate import check_node
from attnkit.lightning.callbacks.study import PRUNERS
from attnkit.lightning.errors import UserError

NODE = "hydra.sweeper"
PREFIX = f"{NODE}."
JOURNAL = "study.journal"
"""The default storage, in the folder of the sweep."""

SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
}


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
    """Of the metric; default: as is known of it by its name."""
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
    """The file of a journal, or a URL of Optuna's; default: a journal in the sweep's folder."""
    study_name: str = "attnkit"
    """Among the studies of a storage."""

    @classmethod
    def read(cls, composer: Composer, words: Sequence[str]) -> "Settings":
        """The settings among Hydra's words.

        Raises:
            UserError: one is wrong, or what it needs is not installed.
        """
        if find_spec("optuna") is None:
            raise UserError(
                "hydra/sweeper=optuna: the package optuna is not installed\n"
                "  pip install 'attnkit[optuna]'"
            )
        made = cls(**settings(composer, words, NODE, cls, "hydra/sweeper=optuna"))
        made._check()
        return made

    def _check(self) -> None:
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"{PREFIX}{name}: expected at least {least}, got {getattr(self, name)}"
                )
        if self.metric is None and self.direction is not None:
            raise UserError(f"{PREFIX}direction: needs {PREFIX}metric, whose direction it is")
        if self.metric is not None and re.match(r"test\b", self.metric):
            raise UserError(f"{PREFIX}metric={self.metric}: a study must not choose by the test")
        if not self.study_name:
            raise UserError(f"{PREFIX}study_name: expected a name")
        if self.sampler == "cmaes" and find_spec("cmaes") is None:
            raise UserError(f"{PREFIX}sampler=cmaes: needs the package cmaes: pip install cmaes")
        for kind, target, options in (
            ("sampler", f"optuna.samplers.{SAMPLERS[self.sampler]}", self.sampler_options),
            ("pruner", f"optuna.pruners.{PRUNERS[self.pruner]}", self.pruner_options),
        ):
            node = {"_target_": target, **(options or {})}
            check_node(f"{PREFIX}{kind}_options", node, Origins())

    def url(self, folder: Path) -> str:
        """The storage of a sweep in this folder: an absolute path, or a URL."""
        return str(folder / JOURNAL if self.storage is None else self.storage)
