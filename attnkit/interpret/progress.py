"""A progress bar for work that takes many forwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

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
