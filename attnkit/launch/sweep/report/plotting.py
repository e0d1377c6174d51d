"""What the pictures of a sweep share: where values lie, how lines look, what explains them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnkit.launch.sweep.report.ranking import SEED, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 8  # rows that a legend still names
_LONGEST = 24  # characters of a value that is written beside a plot


@dataclass(frozen=True)
class Scale:
    """Where the values of a parameter lie on an axis.

    Numbers lie at themselves, or at their logarithm if they span a decade or more (whole numbers:
    two); other values side by side.
    """

    texts: tuple[str, ...]
    """The different values, in order."""
    places: Mapping[str, float]
    numeric: bool
    log: bool

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Scale":
        different = list(dict.fromkeys(texts))
        try:
            numbers = {text: float(text) for text in different}
        except ValueError:
            numbers = {}
        if not numbers or not all(map(math.isfinite, numbers.values())):
            return cls(
                tuple(different), {t: float(i) for i, t in enumerate(different)}, False, False
            )
        ordered = sorted(different, key=numbers.__getitem__)
        whole = all(number.is_integer() for number in numbers.values())
        log = spans(numbers.values(), 100 if whole else 10)
        return cls(tuple(ordered), numbers, True, log)

    def share(self, text: str) -> float:
        """The place between the first, 0, and the last, 1."""
        turn = math.log if self.log else float
        places = [turn(place) for place in self.places.values()]
        low, high = min(places), max(places)
        return (turn(self.places[text]) - low) / (high - low) if high > low else 0.5


def ranked_of(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.rank is not None]


def parameters_of(rows: Sequence[Row]) -> list[str]:
    """The swept keys that have several values among the ranked."""
    found: dict[str, set[str]] = {}
    for row in ranked_of(rows):
        for key, value in row.trials[0].values.items():
            found.setdefault(key, set()).add(value)
    return [key for key, values in found.items() if key != SEED and len(values) > 1]


def spans(values: Sequence[float] | Any, times: float) -> bool:
    values = list(values)
    return bool(values) and min(values) > 0 and max(values) >= times * min(values)


def styled(shown: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The rows and how their lines look, the best last, which is on top of all."""
    colours = _colours()
    for place, row in reversed(list(enumerate(shown))):
        share = place / max(1, len(shown) - 1)
        label = short(f"{row.rank}: {row.label}", 40) if len(shown) <= _NAMED else None
        width = 2.6 if place == 0 else 1.3
        alpha = 1.0 if place == 0 or len(shown) <= _NAMED else 0.6
        yield (
            row,
            {
                "color": colours(share),
                "lw": width,
                "alpha": alpha,
                "zorder": 3 - share,
                "label": label,
            },
        )


def _colours() -> Any:
    """Dark for the best, light for the last, none too light for white paper."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"]([0.9 * i / 255 for i in range(256)]))


def explain(figure: "Figure", axes: "Axes", shown: Sequence[Row]) -> None:
    """A legend of few rows, best first; of many, what the colours mean."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    handles, labels = axes.get_legend_handles_labels()
    named = sorted(zip(labels, handles, strict=True), key=lambda pair: _rank_of(pair[0]))
    if named:
        few = len(shown) <= _NAMED
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if few else {}
        texts, lines = zip(*named, strict=True)
        axes.legend(lines, texts, fontsize=8, frameon=False, **place)
    if len(shown) > _NAMED:
        mappable = ScalarMappable(Normalize(1, len(shown)), _colours())
        bar = figure.colorbar(mappable, ax=axes, label="rank")
        bar.ax.invert_yaxis()


def _rank_of(label: str) -> tuple[int, str]:
    number = label.partition(":")[0]
    return (int(number), "") if number.isdecimal() else (_NAMED + 1, label)


def short(text: str, longest: int = _LONGEST) -> str:
    """Short enough to be written, and no formula of matplotlib's."""
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return text.replace("$", "\\$")


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
