"""Schedules that follow a metric: Lightning steps them after the checkpoint of an epoch."""

from typing import Any

from lightning import Trainer


def monitored(trainer: Trainer) -> dict[str, float]:
    """The value of each metric that such a schedule follows, for the checkpoint."""
    names = {str(c.monitor) for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}
    values = trainer.callback_metrics
    return {name: float(values[name]) for name in names if name in values}


def catch_up(trainer: Trainer, values: dict[str, float]) -> None:
    """Make the schedule's step of the epoch at whose end the checkpoint was saved, which it
    lacks."""
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau or config.interval != "epoch":
            continue
        scheduler: Any = config.scheduler
        is_behind = scheduler.last_epoch < trainer.current_epoch // config.frequency
        if is_behind and config.monitor in values:
            scheduler.step(values[config.monitor])
