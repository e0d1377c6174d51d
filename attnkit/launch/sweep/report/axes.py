"""What the pictures of a sweep have in common: colours, names and ticks that do not overlap."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from attnkit.launch.sweep.numbers import shortened
from attnkit.launch.sweep.report.ranking import Row
from attnkit.lightning.telling.text import in_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 8  # rows that a legend still names
MARKERS = "osD^vPX*"
_LONGEST = 24  # characters of a value that is written beside a plot
_LEGEND = 44  # characters of a line
_CHARACTER = 0.021  # share of a panel's width


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def colours_of(rows: Sequence[Row]) -> Any:
    """From rank to colour; the lightest ones are too light for white paper."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(1, 1 + 1.1 * len(rows)), "viridis")


def name_rows(figure: "Figure", axes: Any, colours: Any, *, few: bool) -> None:
    """A legend beside the axes; of many rows a bar of the ranks."""
    if few:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
        return
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
    ranks = round((colours.norm.vmax - 1) / 1.1)
    figure.colorbar(colours, ax=axes, label="rank").ax.set_ylim(ranks, 1)


def name_places(axes: Any, places: Mapping[str, float], *, numbers: bool) -> None:
    """Ticks at the values where their names have room; else where matplotlib wants them."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    shown = shortened(places)
    names = {place: short(shown[text]) for text, place in places.items()}
    logarithmic = axes.get_xscale() == "log"
    ordered = sorted(math.log10(place) if logarithmic else place for place in names)
    wide = (ordered[-1] - ordered[0]) or 1.0
    gap = min((b - a for a, b in pairwise(ordered)), default=wide) / wide
    room = gap / _CHARACTER >= max(map(len, names.values())) + 1
    if room or not numbers:
        turned = {} if room else {"rotation": 40, "ha": "right"}
        axes.set_xticks([*names], [*names.values()], **turned)
        axes.set_xticks([], minor=True)
    elif logarithmic:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if wide < 3 else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        whole = all(map(float.is_integer, names))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))


def in_legend(text: str) -> str:
    """In up to three lines."""
    lines = wrap(text, _LEGEND, subsequent_indent="    ", break_on_hyphens=False)
    return short("\n".join(lines[:3]), 4 * _LEGEND)


def short(text: str, longest: int = _LONGEST) -> str:
    """Short enough to be written, and no formula of matplotlib's."""
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return in_picture(text)


def spans(values: Iterable[float], times: float) -> bool:
    """Whether the largest is so many times the smallest, which is positive."""
    values = list(values)
    return bool(values) and min(values) > 0 and max(values) >= times * min(values)
