"""A job: decided, checked, and plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit.launch.job.kinds import Kind, kind_of


@dataclass
class Job:
    """One command: the run folder, its configuration, and one resolved configuration per seed."""

    folder: Path
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    fresh: bool = False
    """The folder's name is ours to choose: if it is taken, another one will do."""
    trial: bool = False
    """Of a sweep: the folder may hold the log and the errors of attempts that came to nothing."""
    callbacks: frozenset[str] = frozenset()
    """Names of callbacks that were asked for on the command line."""
    command: str = ""
    """As it was typed."""
    permission: tuple[str, ...] = ()
    """The words of the command line that permit code: --config-dir and allow=."""
    allow: tuple[str, ...] = ()
    """The user's own packages."""
    paths: tuple[str, ...] = ()
    """Folders of the user's own modules."""
    alone: bool = False
    """The checkpoint has no run folder around it: everything comes from inside it."""
    resumed: bool = False
    changes: tuple[str, ...] = ()
    """Overrides given beside resume=."""
    begun: bool = False
    """All objects of the first run could be built, and its folder is written."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.config["run"])
