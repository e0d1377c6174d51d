"""The ranked table for people: on screen, in Markdown, and what it says in words.

A column that is equal in all rows is left out and said once below.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnkit.launch.sweep import numbers
from attnkit.launch.sweep.report.ranking import Row, keys_of
from attnkit.lightning.telling.text import cell, in_line, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

FILE = "table.md"
_NO_SCREEN = 160  # columns in a file or a pipe
_LONG_WORD = 10  # of a header, broken at its underscores
_COLOURS = {"done": None, "failed": "red"}


@dataclass(frozen=True)
class Column:
    """A column: its name, a cell for each row, and whether a narrow screen may do without it."""

    name: str
    cells: list[str]
    left: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Table:
    """What differs between the rows in columns, and what does not."""

    rows: Sequence[Row]
    columns: list[Column]
    same: dict[str, str]
    """Name and cell of the columns that are left out."""

    @classmethod
    def of(cls, rows: Sequence[Row], figures: Sequence[str]) -> "Table":
        """Of these figures of the rows, the most important first."""
        shown, done = _values(rows), [row.state == "done" for row in rows]
        first, *others = figures or ["state"]

        def cells(name: str) -> list[str]:
            return [numbers.figure(row.results, name) for row in rows]

        counts = [f"{row.results.get('num_seeds', 0):g}" for row in rows]
        columns = [
            Column("rank", ["–" if row.rank is None else str(row.rank) for row in rows]),
            Column("trial", [row.numbers for row in rows], left=True),
            *(Column(k, [v.get(k, "") for v in shown], left=True) for k in keys_of(rows)),
            Column("n", [n if d else "" for n, d in zip(counts, done, strict=True)]),
            Column(first, [c if row.state == "done" else row.state
                           for row, c in zip(rows, cells(first), strict=True)]),
            *(Column(name, cells(name), optional=True) for name in others),
        ]  # fmt: skip
        same = {}
        for column in columns[2:]:
            among = [c for c, d in zip(column.cells, done, strict=True) if d or column.left]
            if len(among) > 1 and len(set(among)) == 1 and column.name != first:
                same[column.name] = among[0]
        return cls(rows, [c for c in columns if c.name not in same], same)

    def show(self, console: "Console | None" = None) -> None:
        """On screen, of a narrow one without the least important columns, which are named."""
        from rich.console import Console
        from rich.measure import Measurement

        console = console or Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _NO_SCREEN
        optional = [column for column in self.columns if column.optional]
        for broken, left in [(False, 0), *((True, n) for n in range(len(optional) + 1))]:
            hidden = optional[len(optional) - left :]
            table = self._drawn([c for c in self.columns if c not in hidden], broken=broken)
            wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
            if wide <= console.width:
                break
        console.print(table)
        if hidden:
            names = ", ".join(column.name for column in hidden)
            print(f"The screen is too narrow for {names}: see {FILE}.")

    def _drawn(self, columns: Sequence[Column], *, broken: bool) -> "RichTable":
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(
            title="trials, best first",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for column in columns:
            table.add_column(
                escape(visible(broken_name(column.name) if broken else column.name)),
                justify="left" if column.left else "right",
                overflow="fold",
                min_width=max(map(len, broken_name(column.name).split("\n"))),
            )
        for number, row in enumerate(self.rows):
            cells = [cell(column.cells[number]) for column in columns]
            table.add_row(*cells, style=_COLOURS.get(row.state, "dim"))
        return table

    def as_markdown(self) -> str:
        """With all columns."""
        lines = [
            [column.name for column in self.columns],
            ["---" if column.left else "---:" for column in self.columns],
            *zip(*(column.cells for column in self.columns), strict=True),
        ]
        escaped = ([" ".join(c.split()).replace("|", "\\|") for c in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)

    def in_words(self, shared: Sequence[str]) -> str:
        """What is equal, what differs and what was not tuned.

        Args:
            shared: overrides that all trials have.
        """
        equal = ", ".join(f"{k} {v}" for k, v in self.same.items() if k != "n" and v)
        seeds = {int(r.results.get("num_seeds", 1)) for r in self.rows if r.state == "done"}
        number = f"{min(seeds, default=1)}" + (f" to {max(seeds)}" if len(seeds) > 1 else "")
        states = [row.state for row in self.rows if row.state != "done"]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        same = in_line(" ".join(shared)) or "the defaults"
        differs = ", ".join(key for key in keys_of(self.rows) if key not in self.same) or "nothing"
        return (
            f"{f'Equal in all rows: {equal}. ' if equal else ''}"
            f"The trials differ in {differs}. All else is the same ({same}; seeds in each: "
            f"{number}) and was not tuned for any of them. Ranked by the best validation value; "
            "± is the standard deviation over the seeds."
            f"{f' Not counted: {counts}.' if counts else ''}"
        )


def broken_name(name: str) -> str:
    """A name in lines, which end after its dots and slashes, of long words at underscores."""
    parts = re.split(r"(?<=[/.])", name)
    pieces = [p if len(p) <= _LONG_WORD else re.sub(r"_(?=.)", "_\n", p) for p in parts]
    return "\n".join(pieces)


def _values(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The swept values of each row as they are shown."""
    texts = {
        k: numbers.shortened(r.values[k] for r in rows if k in r.values) for k in keys_of(rows)
    }
    return [{k: in_line(texts[k][v]) for k, v in row.values.items()} for row in rows]
