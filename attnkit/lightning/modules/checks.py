"""Checks before a module is trained: its network, its learning rates, and what is monitored.

A checkpoint must build the network that was trained, a user's own optimizer must use the learning
rates of fine-tuning, and something must log each metric that a callback or the schedule monitors.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from attnkit.finetune.methods import finetuned
from attnkit.lightning import _private as private
from attnkit.lightning.best import Mode, contradiction, mode_of
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.optim import parameter_groups

Shapes = dict[str, "tuple[int, ...] | None"]
_KNOWN = {"attnkit", "lightning", "pytorch_lightning"}  # packages whose metrics are known
_VALIDATION = (
    *("validation_step", "evaluate", "update_metrics", "on_validation_start"),
    *("on_validation_epoch_start", "on_validation_batch_end", "on_validation_epoch_end"),
    "on_train_epoch_end",
)


class NetworkAsBuilt(Callback):
    """Refuses to train a network that was changed after it was built from a configuration.

    Its checkpoints could not be loaded: the configuration in them builds the network without the
    change, such as a call of `insert_attention`.

    Args:
        shapes: shapes of the network when the module was created (`shapes_of`).
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        changed = _apart(self.shapes, shapes_of(pl_module.model))  # type: ignore[arg-type]
        # A class of the user's own may make the change each time it is built.
        if changed and _apart(_built_again(pl_module), shapes_of(pl_module.model)):  # type: ignore[arg-type]
            name = type(pl_module).__name__
            more = " …" if len(changed) > 2 else ""
            raise UserError(
                "model: the network was changed after it was built from its configuration "
                f"({', '.join(changed[:2])}{more}), so that no checkpoint of it could be loaded\n"
                f"  give the changed network to {name} as an object, or make the change in the "
                "configuration or in the __init__ of a class of your own"
            )


def shapes_of(network: nn.Module) -> Shapes:
    """Return the shape of each tensor of a state dict; None: unknown before the first batch."""
    state = network.state_dict(keep_vars=True)
    return {name: None if is_lazy(t) else tuple(t.shape) for name, t in state.items()}


def _apart(built: Shapes | None, here: Shapes) -> list[str]:
    """Return the names of tensors that only one side has, or whose shapes differ."""
    if built is None:
        return []
    names = dict.fromkeys([*here, *built])
    return [
        name
        for name in names
        if name not in built
        or name not in here
        or (None not in (built[name], here[name]) and built[name] != here[name])
    ]


def _built_again(module: Any) -> Shapes | None:
    """Return the shapes of the network that the hyper-parameters build; None if they cannot."""
    try:
        return shapes_of(type(module)(**module.hparams).model)
    except Exception:  # arguments that were objects are missing
        return None


class RatesAreHeeded(Callback):
    """Refuses to train if `layer_decay` and `head_lr` would have no effect.

    All parameters then have one learning rate, although the network was fine-tuned with several, or
    a group still has an `lr_scale`, which only timm's schedules read.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = finetuned(pl_module)
        if found is None:
            return
        _, _, record = found
        given = {"layer_decay": record.layer_decay, "head_lr": record.head_lr}
        keys = [key for key, value in given.items() if value is not None]
        wanted = {(g.get("lr"), g.get("lr_scale")) for g in parameter_groups(pl_module)}
        if not keys or len(wanted) < 2:
            return
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = {float(group.get("initial_lr", group["lr"])) for group in groups}
        by_timm = any(
            type(config.scheduler).__module__.startswith("timm.")
            for config in trainer.lr_scheduler_configs
        )
        unscaled = any("lr_scale" in group for group in groups) and not by_timm
        alike = len(rates) == 1 and (record.layer_decay is not None or rates != {record.head_lr})
        if unscaled or (alike and not by_timm):
            name = f"{type(pl_module).__name__}.configure_optimizers"
            how = "call attnkit.lightning.scale_learning_rates(optimizer)"
            if not unscaled:
                how = (
                    "give the optimizer attnkit.lightning.parameter_groups(self), then "
                    "call scale_learning_rates(optimizer)"
                )
            raise UserError(f"finetune.{' and '.join(keys)}: not used by {name}; {how}")


def check_monitors(module: LightningModule, validation: Mapping[str, object]) -> None:
    """Raise UserError if something monitors a metric that is not logged; for `on_fit_start`.

    It does so too if the worst value is taken for the best. Names of training, `train…`, are not
    checked, since callbacks log some; nor are others if a user's own callback or step may log more.

    Args:
        module: the module; callbacks and schedules of its trainer are checked.
        validation: all validation metrics that the module logs, by name.
    """
    trainer = module.trainer
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    steps = [getattr(type(module), name, None) for name in _VALIDATION]
    packages = [step.__module__.partition(".")[0] for step in steps if step is not None]
    all_known = _KNOWN.issuperset([*packages, *map(_package, callbacks)])
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
