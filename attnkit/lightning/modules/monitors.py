"""Metrics that callbacks and the schedule follow: refused where nothing logs them, or where they
would be followed the wrong way."""

import traceback
from collections.abc import Iterable, Iterator, Mapping

from lightning import Callback, LightningModule, Trainer
from torchmetrics import Metric

from attnkit.lightning import _private as private
from attnkit.lightning.best import Mode, contradiction, mode_of
from attnkit.lightning.errors import UserError

_KNOWN = {"attnkit", "lightning", "pytorch_lightning"}  # packages
_VALIDATION = (
    *("validation_step", "evaluate", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"),
)


def check_monitors(trainer: Trainer, validation: Mapping[str, object]) -> None:
    """UserError if something follows a metric that is not logged; for `on_fit_start`.

    Or if it takes the worst for the best. Names of training, `train…`, are not looked at: callbacks
    log some. Nor are others where a callback of the user's may log more.

    Args:
        trainer: its callbacks and schedules are looked at.
        validation: all that the module logs of validation, by name.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    all_known = all(_package(callback) in _KNOWN for callback in callbacks)
    for name, monitor, _ in _followed(trainer) if all_known else ():
        if not monitor.startswith("train") and monitor not in validation:
            raise _unlogged(name, monitor, "of validation there are", validation)
    check_directions(trainer, validation)


def check_directions(trainer: Trainer, metrics: Mapping[str, object]) -> None:
    """UserError if something follows one of these metrics the wrong way.

    Args:
        trainer: its callbacks and schedules are looked at.
        metrics: by the name they are logged by. Of torchmetrics' the direction is known.
    """
    for name, monitor, follower in _followed(trainer):
        mode = getattr(follower, "mode", None)
        right = direction(monitor, metrics[monitor]) if monitor in metrics else None
        if mode is not None and (wrong := contradiction(monitor, mode, right)):
            raise UserError(f"{name}: mode: {wrong}")


def direction(monitor: str, metric: object) -> Mode | None:
    """Whether less or more of a metric is better: as torchmetrics says, else by its name."""
    more = metric.higher_is_better if isinstance(metric, Metric) else None
    return mode_of(monitor) if more is None else "max" if more else "min"


def validates_as_known(module: type[LightningModule]) -> bool:
    """Whether all that a class logs of validation is known: nothing of it is the user's own."""
    steps = [getattr(module, name, None) for name in _VALIDATION]
    return all(step is None or step.__module__.partition(".")[0] in _KNOWN for step in steps)


class MonitorsInSanityCheck(Callback):
    """Ends a run in the sanity check that validates but does not log a metric of validation which
    something follows, instead of after the first epoch. It needs `num_sanity_val_steps`.

    A run whose checkpoint would take the worst for the best ends there or in the first validation.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_directions(trainer, private.logged_metrics(trainer))

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = trainer.callback_metrics
        for name, monitor, _ in _followed(trainer) if logged else ():
            if monitor.startswith("val") and monitor not in logged:
                said = "in the sanity check (trainer.num_sanity_val_steps) there were"
                raise _unlogged(name, monitor, said, logged)


def unlogged(error: Exception, trainer: Trainer) -> UserError | None:
    """An error of Lightning's about such a metric, in our words; None if it is about another thing.

    It has no type of its own. It is raised by what follows the metric, or for a schedule by the
    loop, in a function of that object.
    """
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    culprit = raising.f_locals.get("self")
    for name, monitor, follower in _followed(trainer):
        by_it = culprit is (trainer.fit_loop.epoch_loop if name == "scheduler" else follower)
        if by_it and monitor not in trainer.callback_metrics:
            return _unlogged(name, monitor, "there are", trainer.callback_metrics)
    return None


def _followed(trainer: Trainer) -> Iterator[tuple[str, str, object]]:
    """What follows a metric: its name, the metric, and the callback or schedule."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(monitor := getattr(callback, "monitor", None), str):
            yield f"callbacks: {type(callback).__name__}", monitor, callback
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:  # others have a default
            yield "scheduler", str(config.monitor), config.scheduler


def _unlogged(name: str, monitor: str, said: str, names: Iterable[str]) -> UserError:
    listed = ", ".join(sorted(names)) or "none"
    return UserError(f"{name}: nothing logs its monitor {monitor!r}; {said} {listed}")


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]
