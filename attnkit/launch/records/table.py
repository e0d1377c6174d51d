"""Records as tables: all there are, and those that were run again with their verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnkit.launch.records.record import Record
from attnkit.launch.records.verdict import Figure, verdict
from attnkit.lightning.files import write_csv, write_text
from attnkit.lightning.telling.numbers import seconds
from attnkit.lightning.telling.text import cell

if TYPE_CHECKING:
    from rich.table import Table

CSV, MARKDOWN = "table.csv", "table.md"
_HEADER = ("record", "metric", "unit", "published", "published_std", "on_record", "on_record_std",
           "now", "now_std", "runs", "verdict", "against", "seconds", "state", "error",
           "folder")  # fmt: skip
_COLUMNS = {"record": 22, "published": 12, "ours": 15, "time": 6, "needs": 9}
_LEGEND = """
published: from the paper; ours: measured here; ±: over seeds or splits.
time: of all runs together, on the machine named in docs/records.md.
  attnkit run=reproduce reproduce.name=NAME [data.root=PATH]  run one
  attnkit run=reproduce reproduce.minutes=N [data.root=PATH]  all that fit"""
_RULE = """\
within spread: |now - reference| is at most sqrt(s^2 + s_ref^2), or half a unit of
the reference's last digit. The reference is the published figure if there is one,
else the figure on record."""
_WIDE = 40  # what is measured, where there is room


@dataclass
class Row:
    """A record that is run again."""

    record: Record
    folder: Path
    now: Figure | None = None
    seconds: float | None = None
    state: str = "waiting"
    error: str = ""

    @property
    def verdict(self) -> str:
        """Empty where there is nothing to compare."""
        reference = self.record.reference
        return verdict(self.now, reference) if self.now and reference else ""

    @property
    def against(self) -> str:
        """What the verdict compares with."""
        if not self.verdict:
            return ""
        return "published" if self.record.published else "on record"


def grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    """By the paper and table that they stand in, those of papers first."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (not record.url, record.group, record.name)):
        groups.setdefault(record.group, []).append(record)
    return groups


def minutes(record: Record) -> str:
    """The time of all its runs: `39 s`, `57 min`."""
    if record.minutes is None:
        return ""
    return f"{60 * record.minutes:.0f} s" if record.minutes < 1.5 else f"{record.minutes:.0f} min"


def listing(records: Sequence[Record]) -> None:
    """All records on screen, in 80 columns; with what they measure where there is room."""
    from rich.console import Console

    console = Console()
    room = console.width - sum(_COLUMNS.values()) - 2 * len(_COLUMNS)
    columns = _COLUMNS | ({"what": room} if room >= _WIDE else {})
    console.print(_aligned(columns, show_header=True))
    for group, inside in grouped(records).items():
        table = _aligned(columns, show_header=False)
        for record in inside:
            figures = (_written(f) for f in (record.published, record.ours))
            cells = [record.name, *figures, minutes(record), record.needs, record.what]
            table.add_row(*map(cell, cells[: len(columns)]))
        console.print(f"\n[bold]{cell(group)}[/bold]", highlight=False)
        console.print(table)
    console.print(_LEGEND, highlight=False, markup=False)


def _aligned(widths: Mapping[str, int], *, show_header: bool) -> "Table":
    """A table without lines, whose columns are as wide as those of the others."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)
    for name, width in widths.items():
        right = name in ("published", "ours", "time")
        table.add_column(name, width=width, justify="right" if right else "left", overflow="fold")
    return table


def show(folder: Path, rows: Sequence[Row]) -> None:
    """On screen: each figure beside what it is held against."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title="reproduced",
                  title_justify="left")  # fmt: skip
    for name in ("record", "published", "on record", "now", "verdict", "time"):
        table.add_column(name, justify="left" if name in ("record", "verdict") else "right",
                         overflow="fold", no_wrap=name == "record")  # fmt: skip
    for row in rows:
        style = {"done": None, "failed": "red"}.get(row.state, "dim")
        table.add_row(*map(cell, _cells(row)), style=style)
    Console().print(table)
    print(_RULE)
    for row in rows:
        if row.error:
            print(f"{row.record.name}: {' '.join(row.error.split())}")
    print(f"  table  {folder / CSV}\n         {folder / MARKDOWN}")


def save(folder: Path, rows: Sequence[Row]) -> None:
    """table.csv and table.md, of what is done so far."""
    lines = []
    for row in rows:
        figures = [row.record.published, row.record.ours, row.now]
        numbers = [x for f in figures for x in ((f.mean, f.std) if f else ("", ""))]
        numbers = ["" if x is None else x for x in numbers]
        runs = row.now.runs if row.now else ""
        took = "" if row.seconds is None else round(row.seconds, 2)
        record = [row.record.name, row.record.metric, row.record.unit]
        end = [row.verdict, row.against, took, row.state, row.error, str(row.folder)]
        lines.append([*record, *numbers, runs, *end])
    write_csv(folder / CSV, _HEADER, lines)
    names = ("record", "published", "on record", "now", "verdict", "time")
    texts = [names, ["---"] * len(names), *map(_cells, rows)]
    text = "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in texts)
    write_text(folder / MARKDOWN, f"{text}\n")


def _cells(row: Row) -> list[str]:
    record = row.record
    figures = (_written(f) for f in (record.published, record.ours, row.now))
    said = row.verdict if row.state == "done" else row.state
    return [record.name, *figures, said, "" if row.seconds is None else seconds(row.seconds)]


def _written(figure: Figure | None) -> str:
    return "" if figure is None else figure.written()
