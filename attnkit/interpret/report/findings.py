"""The results of a report: rows, arrays, sentences and page sections."""

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
"""A row by column; unknown values are None or left out."""


class Judged(NamedTuple):
    """A method's explanation, its trust, and the explanation of another model.

    trust, other: None if they were not requested.
    place: number of the node, or index of the pair, graph or image.
    """

    method: str
    seen: Any
    trust: Any
    other: Any
    place: int = 0


@dataclass(eq=False)
class Findings:
    """The results of a `Report`.

    rows: rows of `scores.csv`, which has the columns that are filled in some row.
    arrays: arrays of `maps.npz`, by name.
    sections: sections of the page, one for each explained input.
    shown: the table on the screen: headings, which may have several lines, then rows of texts.
    caption: text below the table.
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
        """The columns that are filled in some row, in the order in which they first appear."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in names if any(row.get(name) is not None for row in self.rows)]

    def cells(self) -> list[list[str]]:
        """Return the rows as texts for `scores.csv`: numbers with six digits, "" if unknown."""
        return [[_cell(row.get(name)) for name in self.header] for row in self.rows]

    def write(self, folder: Path) -> None:
        """Write `scores.csv` and `maps.npz`."""
        write_csv(folder / SCORES, self.header, self.cells())
        with replacing(folder / MAPS) as file:
            np.savez_compressed(file, **self.arrays)  # type: ignore[arg-type]

    def table(self, title: str) -> Table:
        """Return the table for the screen, 80 characters wide."""
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
    """Return at most five findings as sentences, each with its rows and their numbers.

    Args:
        worth: function from a row to its findings, each with a number.
        called: format of a row's name, such as "node {node}, {map}".
    """
    findings: dict[str, list[str]] = {}
    for row in rows:
        for words, value in worth(row).items():
            findings.setdefault(words, []).append(f"{called.format(**row)} ({value})")
    return [
        f"{words}: {', '.join(named[:4])}" + (f" and {len(named) - 4} more." if named[4:] else ".")
        for words, named in list(findings.items())[:MOST_SAID]
    ]


def table_of(rows: Sequence[Row], columns: Mapping[str, str]) -> list[list[str]]:
    """Return headings and rows of texts, with the columns that are filled in some row.

    Args:
        columns: the content of a column by its heading, which may have several lines: the key of a
            row, or several with words between them, such as "gap ± gap_random".
    """
    cells = [[_shown(row, names.split()) for names in columns.values()] for row in rows]
    filled = [place for place in range(len(columns)) if any(line[place] for line in cells)]
    headings = [*columns]
    return [[line[place] for place in filled] for line in (headings, *cells)]


def number(value: float | None, within: float | None = None) -> str:
    """Return a number with two decimals, and ± a range if given; "" for None."""
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
