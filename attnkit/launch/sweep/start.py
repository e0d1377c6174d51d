"""`-m key=a,b`: every trial checked before the first starts, one folder each, one ranked table.

The trials are on record in sweep.json before the first of them starts, so that whatever ends a
sweep, it can go on (launch/sweep/resume.py).
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException

from attnkit.launch.config._hydra import BasicSweeper
from attnkit.launch.config.compose import Composer
from attnkit.launch.errors import CRASHED, INTERRUPTED, Interrupted, fail
from attnkit.launch.job import folder as folders
from attnkit.launch.job.decide import Request, decide
from attnkit.launch.signals import raise_received
from attnkit.launch.sweep.launchers import Launch
from attnkit.launch.sweep.record import Sweep, key_of, new_trial, write_sweep
from attnkit.launch.sweep.report.page import finish
from attnkit.launch.sweep.trial import Order
from attnkit.lightning.errors import StoppedBySignal, UserError


def sweep(composer: Composer, overrides: Sequence[str]) -> int:
    """Run one trial for each combination; returns the exit code, 1 if a trial failed."""
    parsed = composer.parse(overrides)
    if any(o.key_or_group == "resume" for o in parsed):
        from attnkit.launch.sweep.resume import resume

        return resume(composer, overrides)
    swept = [o for o in parsed if o.is_sweep_override()]
    for override in swept:
        if override.key_or_group in ("run_dir", "allow"):
            raise UserError(f"{override.input_line}: one for all trials")
    place, hydra, rest = sorted_out(overrides)
    if any(o.lstrip("+") == "hydra/sweeper=optuna" for o in hydra):
        from attnkit.launch.sweep.study import loop as study

        return study.start(composer, overrides, place, hydra, rest)
    launch = Launch.read(composer, hydra)
    combinations = _combinations(composer, rest)
    root = Request.read(composer, [*combinations[0], *place]).folder(sweep=True)
    for combination in combinations:
        try:
            decide(Request.read(composer, combination), root / "trial")
        except UserError as error:
            lines = str(error).splitlines()[:2]
            lines.append(f"  in the trial {' '.join(combination)}")
            raise UserError("\n".join(lines)) from error

    root = folders.create(root, fresh=not root.exists())
    keys = tuple(o.key_or_group for o in swept)
    allow = tuple(o for o in rest if key_of(o) == "allow")
    made = [[o for o in c if key_of(o) != "allow"] for c in combinations]
    planned = Sweep(
        root,
        tuple(overrides),
        keys,
        tuple(new_trial(root, keys, number, texts) for number, texts in enumerate(made)),
        hydra=tuple(hydra),
        config_dir=str(composer.config_dir) if composer.config_dir else None,
        allow=allow,
        working_dir=str(Path.cwd()),
    )
    write_sweep(planned)
    print(f"{len(combinations)} trials in {root}", flush=True)
    return run_trials(launch, planned, order_of(composer, planned, allow))


def order_of(composer: Composer, sweep: Sweep, allow: Sequence[str], **kwargs: Any) -> Order:
    """What every trial is told."""
    config_dir = str(composer.config_dir) if composer.config_dir else None
    return Order(str(sweep.folder), config_dir, tuple(allow), **kwargs)


def run_trials(
    launch: Launch, sweep: Sweep, order: Order, ask: Callable[[], Sequence[int]] | None = None
) -> int:
    """Run the trials that the order wants, then show them all; returns the exit code.

    Args:
        ask: what to run next, until it is nothing, where that depends on the trials before.
    """
    wanted = [t.number for t in sweep.trials if t.state != "running" and order.wants(t)]
    once = iter([wanted])
    try:
        while numbers := ask() if ask else next(once, []):
            launch.run(order, numbers)
    except (KeyboardInterrupt, StoppedBySignal) as error:
        by = f"stopped by {error}" if isinstance(error, StoppedBySignal) else str(error)
        said = by.partition("; to go on")[0] or "interrupted"
        again = to_go_on(sweep, order)
        message = f"{said}; the trials after it were not started\nto go on: {again}"
        raise Interrupted(message, getattr(error, "code", INTERRUPTED)) from None
    except Exception as error:
        raise_received()
        fail(error, CRASHED)  # the launcher's; the trials it did run are worth a table
        finish(sweep.folder)
        return CRASHED
    return finish(sweep.folder)


def to_go_on(sweep: Sweep, order: Order) -> str:
    """The command that goes on with a sweep."""
    own = ["--config-dir", order.config_dir] if order.config_dir else []
    words = [shlex.quote(word) for word in (*own, *order.allow, *sweep.hydra)]
    return " ".join(["attnkit -m", folders.as_override("resume", sweep.folder), *words])


def sorted_out(overrides: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The sweep's own folder, Hydra's settings, and what the trials are made of."""
    place = [o for o in overrides if key_of(o) == "run_dir"]
    hydra = [o for o in overrides if re.match(r"hydra[./]", key_of(o))]
    known = ("hydra/sweeper=basic", "hydra/sweeper=optuna")
    study = any(override.lstrip("+") == known[1] for override in hydra)
    for override in hydra:
        if not key_of(override).startswith(("hydra/sweeper", "hydra.sweeper")):
            continue
        if not (override.lstrip("+") in known or (study and key_of(override)[5] == ".")):
            raise UserError(
                f"{override}: attnkit makes the combinations itself, of key=a,b\n"
                "  hydra/sweeper=basic: all of them; optuna: a study, with hydra.sweeper.*"
            )
    return place, hydra, [o for o in overrides if o not in place and o not in hydra]


def _combinations(composer: Composer, overrides: Sequence[str]) -> list[list[str]]:
    parsed = composer.parse(overrides)
    for override in parsed:
        if override.is_interval_sweep():
            raise UserError(
                f"{override.input_line}: a range to choose from, not values\n"
                "  key=a,b or key=range(1,9); or let Optuna choose: hydra/sweeper=optuna"
            )
    try:
        combinations = BasicSweeper.split_arguments(parsed, None)[0]
    except HydraException as error:
        raise UserError(f"-m: {error}") from error
    if not combinations:
        raise UserError("-m: no trial: a glob(…) that no choice of its group fits")
    return combinations
