"""Metrics that callbacks and the schedule follow: refused where nothing logs them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from lightning import Callback, LightningModule, Trainer

from attnkit.lightning.errors import UserError

_KNOWN = {"attnkit", "lightning", "pytorch_lightning"}  # packages
_VALIDATION = (
    *("validation_step", "evaluate", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"),
)
# What Lightning says after the first epoch: of ModelCheckpoint, of EarlyStopping, of a schedule.
_LIGHTNINGS = (
    r"`ModelCheckpoint\(monitor='(.+?)'\)` could not find the monitored key.*?: \[(.*?)\]",
    r"Early stopping conditioned on metric `(.+?)` which is not available.*?following: (.*)",
    r"ReduceLROnPlateau conditioned on metric (\S+) which is not available.*?: \[(.*?)\]",
)


def check_monitors(trainer: Trainer, validation: Iterable[str]) -> None:
    """UserError if something follows a metric that is not logged; for `on_fit_start`.

    Names of training, `train…`, are not looked at: callbacks log some. Nor is anything where a
    callback of the user's may log more.

    Args:
        trainer: its callbacks and schedules are looked at.
        validation: all that the module logs of validation.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if all(_package(callback) in _KNOWN for callback in callbacks):
        for name, monitor in _followed(trainer):
            if not monitor.startswith("train") and monitor not in validation:
                raise _unlogged(name, monitor, "of validation there are", validation)


def validates_as_known(module: type[LightningModule]) -> bool:
    """Whether all that a class logs of validation is known: nothing of it is the user's own."""
    steps = [getattr(module, name, None) for name in _VALIDATION]
    return all(step is None or step.__module__.partition(".")[0] in _KNOWN for step in steps)


class MonitorsInSanityCheck(Callback):
    """Ends a run in the sanity check that validates but does not log a metric of validation which
    something follows, instead of after the first epoch. It needs `num_sanity_val_steps`."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = trainer.callback_metrics
        for name, monitor in _followed(trainer) if logged else ():
            if monitor.startswith("val") and monitor not in logged:
                said = "in the sanity check (trainer.num_sanity_val_steps) there were"
                raise _unlogged(name, monitor, said, logged)


def unlogged(error: Exception) -> UserError | None:
    """Lightning's error about such a metric, in our words; None if it is about something else."""
    ours = ("callbacks: ModelCheckpoint", "callbacks: EarlyStopping", "scheduler")
    for name, pattern in zip(ours, _LIGHTNINGS, strict=True):
        if found := re.search(pattern, str(error), re.DOTALL):
            monitor, names = found.groups()
            return _unlogged(name, monitor, "there are", re.findall(r"[^\s,'`]+", names))
    return None


def _followed(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """What follows a metric, and which."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    followers: list[tuple[str, Any]] = [(f"callbacks: {type(c).__name__}", c) for c in callbacks]
    followers += [("scheduler", config) for config in trainer.lr_scheduler_configs]
    for name, follower in followers:
        is_followed = getattr(follower, "reduce_on_plateau", True)  # others have a default
        monitor = getattr(follower, "monitor", None)
        if isinstance(monitor, str) and is_followed:
            yield name, monitor


def _unlogged(name: str, monitor: str, said: str, names: Iterable[str]) -> UserError:
    listed = ", ".join(sorted(names)) or "none"
    return UserError(f"{name}: nothing logs its monitor {monitor!r}; {said} {listed}")


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]
