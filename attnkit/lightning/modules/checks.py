"""Checks of a module before it is trained: its network, and the learning rates of its optimizer.

A checkpoint must build the network that was trained, and a user's own optimizer must use the
learning rates of fine-tuning.
"""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy

from attnkit.finetune.record import finetuned
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.optim import parameter_groups

Shapes = dict[str, "tuple[int, ...] | None"]


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
