"""The settings of a study (`hydra.sweeper.*`) and its search space.

The space is written in Hydra's syntax of sweeps, and becomes Optuna's distributions.

| written | searched |
|---|---|
| `a,b` `choice(a,b)` `glob(x*)` | the values, without an order |
| `range(1,9,2)` | whole or decimal numbers at equal distances, without the end |
| `interval(a,b)` | decimal numbers from a to b |
| `int(interval(a,b))` | whole numbers from a to b, both included |
| `tag(log, interval(a,b))` | the same on a logarithmic scale; also with `int(…)` |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
)

from attnkit.launch.config.compose import Composer
from attnkit.launch.config.files import Origins
from attnkit.launch.config.hydra_words import settings
from attnkit.launch.config.validate import check_node
from attnkit.lightning.errors import UserError
from attnkit.lightning.study import PRUNERS

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


NODE = "hydra.sweeper"
PREFIX = f"{NODE}."
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
}


@dataclass(frozen=True)
class Settings:
    """The settings of a study."""

    n_trials: int = 20
    """Number of trials in the whole study, over all processes; failed and pruned ones count."""
    n_jobs: int = 1
    """Number of trials that are given to the launcher at once."""
    metric: str | None = None
    """A validation metric; default: the monitor of callbacks.checkpoint."""
    direction: Literal["minimize", "maximize"] | None = None
    """The direction of the metric; default: known by the metric's name."""
    sampler: Literal["tpe", "random", "gp", "cmaes", "qmc"] = "tpe"
    sampler_options: dict[str, Any] | None = None
    """Arguments of Optuna's sampler class."""
    pruner: Literal[
        "none", "median", "percentile", "successive_halving", "hyperband", "threshold"
    ] = "none"
    pruner_options: dict[str, Any] | None = None
    seed: int = 0
    """The seed of the sampler."""
    storage: str | Path | None = None
    """A journal file or a URL that Optuna understands; default: a journal in the sweep's folder."""
    study_name: str = "attnkit"
    """The name of the study in its storage."""

    @classmethod
    def read(cls, composer: Composer, words: Sequence[str]) -> Settings:
        """Return the settings among Hydra's words, checked without importing Optuna.

        Raises:
            UserError: a setting is wrong, or a package that it needs is not installed.
        """
        if find_spec("optuna") is None:
            raise UserError(
                "hydra/sweeper=optuna: the package optuna is not installed\n"
                "  pip install 'attnkit[optuna]'"
            )
        own = cls(**settings(composer, words, NODE, cls, "hydra/sweeper=optuna"))
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            if (given := getattr(own, name)) < least:
                raise UserError(f"{PREFIX}{name}: expected at least {least}, got {given}")
        if own.metric is None and own.direction is not None:
            raise UserError(f"{PREFIX}direction: needs {PREFIX}metric, to which it applies")
        if own.metric is not None and re.match(r"test\b", own.metric):
            raise UserError(
                f"{PREFIX}metric={own.metric}: a study must not choose by a test metric"
            )
        if not own.study_name:
            raise UserError(f"{PREFIX}study_name: expected a name")
        if own.sampler == "cmaes" and find_spec("cmaes") is None:
            raise UserError(f"{PREFIX}sampler=cmaes: needs the package cmaes: pip install cmaes")
        for kind, target, options in (
            ("sampler", f"optuna.samplers.{SAMPLERS[own.sampler]}", own.sampler_options),
            ("pruner", f"optuna.pruners.{PRUNERS[own.pruner]}", own.pruner_options),
        ):
            node = {"_target_": target, **(options or {})}
            check_node(f"{PREFIX}{kind}_options", node, Origins())
        return own


def distributions(swept: Sequence[Override]) -> dict[str, BaseDistribution]:
    """Return a distribution for each swept key, under the text of the override up to its `=`.

    Raises:
        UserError: no key is swept, a key is swept twice, or a value is not a search space.
    """
    space: dict[str, BaseDistribution] = {}
    for override in swept:
        name = override.get_key_element()
        if name in space:
            raise UserError(f"{override.input_line}: {name} is searched already")
        try:
            space[name] = _distribution(override)
        except ValueError as error:
            raise UserError(f"{override.input_line}: {error}") from error
    if not space:
        raise UserError(
            "hydra/sweeper=optuna: nothing to search\n"
            "  key='interval(1e-4,1e-2)', key='tag(log,interval(1e-4,1e-2))', key=a,b"
        )
    return space


def texts(params: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a trial with these values; `repr` keeps every digit."""
    return [f"{key}={v if isinstance(v, str) else repr(v)}" for key, v in params.items()]


def corners(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return a few points that cover every choice and both ends of every range, for checks."""
    from optuna.distributions import CategoricalDistribution

    ends = {
        name: list(d.choices) if isinstance(d, CategoricalDistribution) else [d.low, d.high]  # type: ignore[attr-defined]
        for name, d in space.items()
    }
    number = max(map(len, ends.values()))
    return [{name: v[min(i, len(v) - 1)] for name, v in ends.items()} for i in range(number)]


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    value = override.value()
    tags = set(getattr(value, "tags", None) or ())
    if other := tags - ({"log"} if isinstance(value, IntervalSweep) else set()):
        raise ValueError(f"tag {other.pop()}: only tag(log,interval(…)) is supported")
    if isinstance(value, IntervalSweep):
        return _interval(value, log="log" in tags)
    if getattr(value, "shuffle", False):
        raise ValueError("shuffle: not supported, a study has no order")
    if isinstance(value, RangeSweep):
        return _range(value)
    if isinstance(value, ChoiceSweep) and any(
        isinstance(v, QuotedString) and "\n" in v.text for v in value.list
    ):
        raise ValueError("a value of several lines")
    choices = list(dict.fromkeys(override.sweep_string_iterator()))
    if not choices:
        raise ValueError("no value")
    return CategoricalDistribution(choices)


def _interval(sweep: IntervalSweep, *, log: bool) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high = sweep.start, sweep.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("expected two numbers")
    if low > high:
        raise ValueError(f"expected the lower end first, got {low} and {high}")
    if log and low <= 0:
        raise ValueError(f"on a logarithmic scale, expected a lower end above 0, got {low}")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def _range(sweep: RangeSweep) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    # Decimal, so that range(0,1,0.1) has ten values
    start, stop, step = (Decimal(str(v)) for v in (sweep.start, sweep.stop, sweep.step))
    number = math.ceil((stop - start) / step) if step else 0
    if number < 1:
        raise ValueError("no value")
    ends = sorted((start, start + (number - 1) * step))
    if all(isinstance(v, int) for v in (sweep.start, sweep.stop, sweep.step)):
        return IntDistribution(int(ends[0]), int(ends[1]), step=int(abs(step)))
    return FloatDistribution(float(ends[0]), float(ends[1]), step=float(abs(step)))
