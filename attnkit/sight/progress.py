"""A progress bar for work that takes many forwards."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

SECONDS_WITHOUT_PROGRESS = 2.0


def shown(chunks: Sequence[Tensor], description: str) -> Iterator[Tensor]:
    """The chunks, with a progress bar where they take longer than some seconds."""
    start = time.monotonic()
    with ExitStack() as stack:
        progress = None
        for number, chunk in enumerate(chunks):
            if progress is None and time.monotonic() - start > SECONDS_WITHOUT_PROGRESS:
                console = Console(stderr=True)
                progress = Progress(
                    console=console, transient=True, disable=not console.is_terminal
                )
                stack.enter_context(progress)
                task = progress.add_task(description, total=len(chunks))
            if progress is not None:
                progress.update(task, completed=number)
            yield chunk
