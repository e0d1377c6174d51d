"""What was found, in the forms that are kept: rows, arrays, sentences, parts of a page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from attnkit.interpret.report.page import Section
from attnkit.lightning.console import cell
from attnkit.lightning.files import replacing, write_csv

SCORES, MAPS, PAGE = "scores.csv", "maps.npz", "explain.html"
MOST_SAID = 5

Row = dict[str, Any]
"""By column; what is not known is None or left out."""


class Judged(NamedTuple):
    """One method's explanation, how far to trust it, and the same of another model; each None where
    it was not asked for. `place` is the number of the node, or the place among the graphs."""

    method: str
    seen: Any
    trust: Any
    other: Any
    place: int = 0


@dataclass(eq=False)
class Findings:
    """What `Report` found.

    rows: of `scores.csv`, which has the columns of the first row that are filled anywhere.
    arrays: of `maps.npz`, by name.
    sections: of the page, one a thing explained.
    shown: the table on the screen: headings, which may have several lines, then rows of texts.
    caption: below it.
    said: at most five sentences, the most important first.
    """

    rows: list[Row]
    arrays: dict[str, np.ndarray]
    sections: list[Section] = field(default_factory=list)
    shown: Sequence[Sequence[str]] = ()
    caption: str = ""
    said: list[str] = field(default_factory=list)

    @property
    def header(self) -> list[str]:
        """The columns that are filled in some row, in the order of the first that has them."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in names if any(row.get(name) is not None for row in self.rows)]

    def cells(self) -> list[list[str]]:
        """The rows as `scores.csv` has them: numbers of six digits, nothing where unknown."""
        return [[_cell(row.get(name)) for name in self.header] for row in self.rows]

    def write(self, folder: Path) -> None:
        """Write `scores.csv` and `maps.npz`."""
        write_csv(folder / SCORES, self.header, self.cells())
        with replacing(folder / MAPS) as file:
            np.savez_compressed(file, **self.arrays)  # type: ignore[arg-type]

    def table(self, title: str) -> Table:
        """The table on the screen, of 80 columns."""
        table = Table(title=title, title_justify="left", caption=self.caption or None, width=80)
        table.caption_justify = "left"
        headings, *rows = self.shown
        for place, heading in enumerate(headings):
            lines = "\n".join(map(cell, heading.split("\n")))
            table.add_column(lines, justify="right" if place else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(cell, row))
        return table


def findings_of(
    rows: Sequence[Row], worth: Callable[[Row], Mapping[str, str]], called: str
) -> list[str]:
    """At most five sentences, each with the rows it holds of and their numbers.

    Args:
        worth: what is worth saying of a row, and its number.
        called: what a row is called, such as "node {node}, {map}".
    """
    said: dict[str, list[str]] = {}
    for row in rows:
        for words, value in worth(row).items():
            said.setdefault(words, []).append(f"{called.format(**row)} ({value})")
    return [
        f"{words}: {', '.join(named[:4])}" + (f" and {len(named) - 4} more." if named[4:] else ".")
        for words, named in list(said.items())[:MOST_SAID]
    ]


def table_of(rows: Sequence[Row], columns: Mapping[str, str]) -> list[list[str]]:
    """Headings, and rows of texts, of the columns that are filled in some row.

    Args:
        columns: by heading, which may have several lines, the name of a number or a text, or
            several with words between them, such as "gap ± gap_random".
    """
    cells = [[_shown(row, names.split()) for names in columns.values()] for row in rows]
    filled = [place for place in range(len(columns)) if any(line[place] for line in cells)]
    headings = [*columns]
    return [[line[place] for place in filled] for line in (headings, *cells)]


def number(value: float | None, within: float | None = None) -> str:
    """Two digits of a number, with ± a range; nothing of None."""
    if value is None:
        return ""
    text = f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
    return text if within is None else f"{text} ± {within:.2f}"


def _shown(row: Row, names: Sequence[str]) -> str:
    if row.get(names[0]) is None:
        return ""
    values = (row.get(name, name) for name in names)
    return " ".join(number(one) if isinstance(one, float) else str(one) for one in values)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
