"""A line of a run: on screen and, on the command line, in run.log."""

import logging
import sys

from rich import get_console
from rich.console import Console

from attnkit.lightning.telling.text import visible

log = logging.getLogger("attnkit.run")
"""Writes run.log; in a plain Trainer it has no handler."""


def say(text: str, *, error: bool = False) -> None:
    """A line on the screen (`error`: stderr) and in run.log."""
    # rich's own console puts the line above its progress bar; another would write into it
    console = Console(stderr=True) if error else get_console()
    console.print(visible(text), soft_wrap=True, highlight=False, markup=False, emoji=False)
    (sys.stderr if error else sys.stdout).flush()
    log.info("%s", text)


def on_terminal() -> bool:
    """Whether a progress bar can be shown, in a terminal or a notebook; else lines replace it."""
    console = Console()
    return console.is_terminal or console.is_jupyter
