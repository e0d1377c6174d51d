"""Whether a figure agrees with another, and how both are written."""

import math
from dataclasses import dataclass

WITHIN, ABOVE, BELOW = "within spread", "above", "below"


@dataclass(frozen=True)
class Figure:
    """A mean over runs, in the unit of its record.

    Args:
        mean: as it is written: its last digit says how exact it is.
        std: standard deviation over the runs; None: unknown, or there was one run.
        runs: how many; None: unknown.
        tolerance: how far another may be away, whatever the deviations; None: half a unit of the
            last digit of the mean.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    tolerance: float | None = None

    @property
    def places(self) -> int:
        """Decimals of the mean as it was written."""
        return _places(self.mean)

    def written(self) -> str:
        """`83.05 ± 0.37`."""
        places = max(self.places, 0 if self.std is None else _places(self.std))
        is_small = 0 < abs(self.mean) < 1e-3
        numbers = [self.mean] if self.std is None else [self.mean, self.std]
        return " ± ".join(f"{n:.0e}" if is_small else f"{n:.{places}f}" for n in numbers)


def _places(number: float) -> int:
    text = repr(number)
    return 0 if "e" in text else len(text.partition(".")[2])


def verdict(new: Figure, reference: Figure) -> str:
    """`within spread`, `above` or `below`: on which side of the reference the new figure lies.

    It is within if |new − reference| ≤ max(√(s² + s_ref²), tolerance), s the standard deviations
    over runs, 0 where one is unknown.
    """
    spread = math.hypot(new.std or 0.0, reference.std or 0.0)
    tolerance = reference.tolerance
    if tolerance is None:
        tolerance = 0.5 * 10.0**-reference.places
    difference = new.mean - reference.mean
    if abs(difference) <= max(spread, tolerance) * (1 + 1e-9):
        return WITHIN
    return ABOVE if difference > 0 else BELOW
