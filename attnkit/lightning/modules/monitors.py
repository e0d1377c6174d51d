"""Checks of the metrics that callbacks and the schedule monitor: something must log them, and the
direction must be right."""

import traceback
from collections.abc import Iterable, Iterator, Mapping

from lightning import Callback, LightningModule, Trainer
from torchmetrics import Metric

from attnkit.lightning import _private as private
from attnkit.lightning.best import Mode, contradiction, mode_of
from attnkit.lightning.errors import UserError

_KNOWN = {"attnkit", "lightning", "pytorch_lightning"}  # packages whose metrics are known
_VALIDATION = (
    *("validation_step", "evaluate", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"),
)


def check_monitors(trainer: Trainer, validation: Mapping[str, object]) -> None:
    """Raise UserError if something monitors a metric that is not logged; for `on_fit_start`.

    It does so too if the worst value is taken for the best. Names of training, `train…`, are not
    checked, since callbacks log some; nor are others if a user's own callback may log more.

    Args:
        trainer: its callbacks and schedules are checked.
        validation: all validation metrics that the module logs, by name.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    all_known = all(_package(callback) in _KNOWN for callback in callbacks)
    for name, monitor, _ in _followed(trainer) if all_known else ():
        if not monitor.startswith("train") and monitor not in validation:
            raise _unlogged(name, monitor, "validation logs", validation)
    check_directions(trainer, validation)


def check_directions(trainer: Trainer, metrics: Mapping[str, object]) -> None:
    """Raise UserError if something monitors one of these metrics in the wrong direction.

    Args:
        trainer: its callbacks and schedules are checked.
        metrics: metrics by their logged names. torchmetrics' know their direction.
    """
    for name, monitor, follower in _followed(trainer):
        mode = getattr(follower, "mode", None)
        right = direction(monitor, metrics[monitor]) if monitor in metrics else None
        if mode is not None and (wrong := contradiction(monitor, mode, right)):
            raise UserError(f"{name}: mode: {wrong}")


def direction(monitor: str, metric: object) -> Mode | None:
    """Return the direction in which a metric is better, by torchmetrics, else by its name."""
    more = metric.higher_is_better if isinstance(metric, Metric) else None
    return mode_of(monitor) if more is None else "max" if more else "min"


def validates_as_known(module: type[LightningModule]) -> bool:
    """Whether all validation metrics of a class are known: none of its steps is the user's own."""
    steps = [getattr(module, name, None) for name in _VALIDATION]
    return all(step is None or step.__module__.partition(".")[0] in _KNOWN for step in steps)


class MonitorsInSanityCheck(Callback):
    """Ends a run in the sanity check, instead of after the first epoch, if it validates and does
    not log a monitored validation metric. It needs `num_sanity_val_steps`.

    A run whose checkpoint would take the worst for the best ends there or in the first validation.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_directions(trainer, private.logged_metrics(trainer))

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = trainer.callback_metrics
        for name, monitor, _ in _followed(trainer) if logged else ():
            if monitor.startswith("val") and monitor not in logged:
                where = "the sanity check (trainer.num_sanity_val_steps) logged"
                raise _unlogged(name, monitor, where, logged)


def unlogged(error: Exception, trainer: Trainer) -> UserError | None:
    """Return Lightning's error about an unlogged metric in attnkit's words; None for others.

    The error has no type of its own. It is raised by the object that monitors the metric, or for a
    schedule by the loop, in a function of that object.
    """
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    culprit = raising.f_locals.get("self")
    for name, monitor, follower in _followed(trainer):
        by_it = culprit is (trainer.fit_loop.epoch_loop if name == "scheduler" else follower)
        if by_it and monitor not in trainer.callback_metrics:
            return _unlogged(name, monitor, "logged are", trainer.callback_metrics)
    return None


def _followed(trainer: Trainer) -> Iterator[tuple[str, str, object]]:
    """Yield what monitors a metric: its name, the metric, and the callback or schedule."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(monitor := getattr(callback, "monitor", None), str):
            yield f"callbacks: {type(callback).__name__}", monitor, callback
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:  # other schedules have a default monitor
            yield "scheduler", str(config.monitor), config.scheduler


def _unlogged(name: str, monitor: str, where: str, names: Iterable[str]) -> UserError:
    listed = ", ".join(sorted(names)) or "none"
    return UserError(f"{name}: nothing logs its monitor {monitor!r}; {where} {listed}")


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]
