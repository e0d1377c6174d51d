"""What results and long computations write to the terminal: tables of text and a progress bar."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import track
from torch import Tensor


def text_table(rows: Iterable[Sequence[object]], num_left: int = 1) -> str:
    """Return rows of cells as lines, with two spaces between columns.

    Args:
        rows: rows of the same length, the heading first.
        num_left: number of first columns that are left-aligned; the others are right-aligned.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def shown(chunks: Sequence[Tensor], description: str) -> Iterator[Tensor]:
    """Yield the chunks with a progress bar, which is erased at the end; none without a terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    yield from track(chunks, description, console=console, transient=True, disable=hidden)
