"""A line of a run: on screen and, on the command line, in run.log."""

import logging
import sys

from rich.console import Console
from rich.markup import escape

log = logging.getLogger("attnkit.run")
"""What run.log is written by; in a plain Trainer nobody listens."""


def say(text: str, *, error: bool = False) -> None:
    """A line on the screen (`error`: stderr) and in run.log."""
    Console(stderr=error, soft_wrap=True, highlight=False).print(escape(text))
    (sys.stderr if error else sys.stdout).flush()
    log.info("%s", text)


def on_terminal() -> bool:
    """Whether somebody watches: else lines take the place of progress bars."""
    return Console().is_terminal
