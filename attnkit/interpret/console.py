"""What results and long computations write to the terminal: tables of text and a progress bar."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import Progress
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


SECONDS_WITHOUT_PROGRESS = 2.0
_bar: ContextVar[Progress | None] = ContextVar("bar", default=None)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar of `total` steps; call the yielded function with the next step's name.

    Longer work within a step adds a line of its own. Without a terminal there is no bar.
    """
    with _progress() as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def step(doing: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=doing)
            begun += 1

        token = _bar.set(progress)
        try:
            yield step
        finally:
            _bar.reset(token)


def shown(chunks: Sequence[Tensor], description: str) -> Iterator[Tensor]:
    """Yield the chunks; show a progress bar if they take longer than some seconds."""
    start, progress, task = time.monotonic(), None, None
    with ExitStack() as stack:
        for number, chunk in enumerate(chunks):
            if progress is None and time.monotonic() - start > SECONDS_WITHOUT_PROGRESS:
                progress = _bar.get() or stack.enter_context(_progress())
                task = progress.add_task(description, total=len(chunks))
                stack.callback(progress.remove_task, task)
            if progress is not None and task is not None:
                progress.update(task, completed=number)
            yield chunk


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
