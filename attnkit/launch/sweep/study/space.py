"""The search space of a study: sweeps in Hydra's own syntax as Optuna's distributions.

| written | searched |
|---|---|
| `a,b` `choice(a,b)` `glob(x*)` | the values, without an order |
| `range(1,9,2)` | whole or decimal numbers at equal distances, without the end |
| `interval(a,b)` | decimal numbers from a to b |
| `int(interval(a,b))` | whole numbers from a to b, both included |
| `tag(log, interval(a,b))` | the same on a logarithmic scale; also of `int(…)` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
)

from attnkit.lightning.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def distributions(swept: Sequence[Override]) -> dict[str, BaseDistribution]:
    """A distribution for each swept key, by the override up to its `=`.

    Raises:
        UserError: nothing is swept, a key twice, or what is written is not a space.
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
    """The overrides of a trial with these values; `repr` keeps every digit."""
    return [f"{key}={v if isinstance(v, str) else repr(v)}" for key, v in params.items()]


def corners(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """A few points that cover every choice and both ends of every range, for checks beforehand."""
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

    # in decimals, so that range(0,1,0.1) has ten values
    start, stop, step = (Decimal(str(v)) for v in (sweep.start, sweep.stop, sweep.step))
    number = math.ceil((stop - start) / step) if step else 0
    if number < 1:
        raise ValueError("no value")
    ends = sorted((start, start + (number - 1) * step))
    if all(isinstance(v, int) for v in (sweep.start, sweep.stop, sweep.step)):
        return IntDistribution(int(ends[0]), int(ends[1]), step=int(abs(step)))
    return FloatDistribution(float(ends[0]), float(ends[1]), step=float(abs(step)))
