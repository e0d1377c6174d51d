"""Runs the trials of a sweep that an order asks for, then shows all."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnkit.launch.command import key_of
from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Job, Request, decide
from attnkit.launch.errors import CRASHED, INTERRUPTED, Interrupted, fail
from attnkit.launch.signals import raise_received
from attnkit.launch.sweep.launchers import Launch
from attnkit.launch.sweep.record import Sweep, to_go_on, write_sweep
from attnkit.launch.sweep.report import finish
from attnkit.launch.sweep.trial import Order
from attnkit.lightning.errors import StoppedBySignal, UserError
from attnkit.lightning.files import SHARED_FOLDER


def run_trials(launch: Launch, sweep: Sweep, order: Order, batches: Iterable[Sequence[int]]) -> int:
    """Run trials, then show all of the sweep; returns the exit code.

    Args:
        launch: where they run.
        sweep: of the trials.
        order: what each of them is told.
        batches: their numbers; the next ones are asked for when those before have ended.
    """
    try:
        with _sharing(sweep.folder / ".shared"):
            for numbers in filter(None, batches):
                launch.run(order, numbers)
    except (KeyboardInterrupt, StoppedBySignal) as error:
        by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else "interrupted"
        said = getattr(error, "said", by)
        permitted = replace(sweep, config_dir=order.config_dir, allow=order.allow)
        raise Interrupted(
            f"{said}; the trials after it were not started",
            f"\nto go on: {to_go_on(permitted)}",
            getattr(error, "code", INTERRUPTED),
        ) from None
    except Exception as error:
        raise_received()
        fail(error, CRASHED)  # the launcher's; the trials that did run are worth a table
        finish(sweep.folder)
        return CRASHED
    return finish(sweep.folder)


@contextmanager
def _sharing(folder: Path) -> Iterator[None]:
    """A temporary folder in which trials share decoded images."""
    os.environ[SHARED_FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[SHARED_FOLDER]
        shutil.rmtree(folder, ignore_errors=True)


def begin(
    composer: Composer,
    root: Path,
    command: Sequence[str],
    words: Sequence[str],
    keys: Sequence[str],
    **kwargs: Any,
) -> Sweep:
    """Write down a sweep of this command; `words` are Hydra's."""
    sweep = Sweep(
        root,
        (*command, *words),
        tuple(keys),
        hydra=tuple(words),
        config_dir=str(composer.config_dir) if composer.config_dir else None,
        allow=tuple(o for o in command if key_of(o) == "allow"),
        working_dir=str(Path.cwd()),
        **kwargs,
    )
    write_sweep(sweep)
    return sweep


def order_of(composer: Composer, sweep: Sweep, allow: Sequence[str], **kwargs: Any) -> Order:
    """What every trial is told."""
    config_dir = str(composer.config_dir) if composer.config_dir else None
    return Order(str(sweep.folder), config_dir, tuple(allow), **kwargs)


def check_trial(composer: Composer, overrides: Sequence[str], root: Path) -> Job:
    """What a trial with these overrides would do; what is wrong with it is an error now."""
    try:
        return decide(Request.read(composer, overrides), root / "trial")
    except UserError as error:
        lines = [*str(error).splitlines()[:2], f"  in the trial {' '.join(overrides)}"]
        raise UserError("\n".join(lines)) from error
