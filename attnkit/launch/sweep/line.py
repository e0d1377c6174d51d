"""A trial in one line on screen; all that it prints goes to output.log in its folder."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any

from attnkit.launch.job import folder as folders
from attnkit.launch.sweep.ranking import Metric, figure
from attnkit.launch.sweep.record import OUTPUT, Trial, shortened
from attnkit.lightning.errors import UserError
from attnkit.lightning.telling.text import cell, in_line


def line_of(trial: Trial) -> str:
    """`trial 3  optimizer.lr=0.00121  val/loss_best 0.557  4.18 s  done`."""
    parts = [begin_of(trial)]
    if trial.state == "done":
        try:
            name = Metric.of(folders.load_config(trial.folder)).name
        except UserError:  # not there any more
            name = ""
        figures = ((name, f"{name} "), ("seconds", ""))
        parts += [f"{said}{figure(trial.results, name)}"
                  for name, said in figures if name in trial.results]  # fmt: skip
    parts.append(trial.state)
    if trial.state == "pruned":
        parts.append(trial.error.splitlines()[0])
    return in_line("  ".join(parts))


def begin_of(trial: Trial) -> str:
    """Its number and its values."""
    values = (f"{k}={shortened([v])[v]}" for k, v in trial.values.items())
    return in_line(f"trial {trial.number}  {' '.join(values)}".rstrip())


@contextmanager
def printing_apart(trial: Trial) -> Iterator[None]:
    """What is printed in the block goes to the trial's folder; a terminal shows that it runs."""
    from rich.console import Console

    console = Console(highlight=False)
    where = cell(f"{begin_of(trial)}  {trial.folder}")
    running = console.status(where, refresh_per_second=1) if console.is_terminal else nullcontext()
    with (
        (trial.folder / OUTPUT).open("a", encoding="utf-8", errors="backslashreplace") as output,
        running,
    ):
        streams = _Stream(sys.stdout), _Stream(sys.stderr)
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            try:
                for stream in streams:
                    stream.pointed_to = output
                yield
            finally:
                for stream in streams:
                    stream.pointed_to = stream.own


class _Stream:
    """A stream that is redirected for a while, so that a logger which keeps it never holds a closed
    one."""

    def __init__(self, own: Any) -> None:
        self.own = self.pointed_to = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pointed_to, name)
