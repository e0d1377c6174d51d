"""Whether an optimizer that a user makes heeds the learning rates of fine-tuning."""

from lightning import Callback, LightningModule, Trainer

from attnkit.finetune.record import finetuned
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.parameter_groups import parameter_groups


class RatesAreHeeded(Callback):
    """Refuses to train where `layer_decay` and `head_lr` would do nothing.

    That is, where all parameters have one learning rate though the network was fine-tuned with
    several, or a group has still an `lr_scale`, which only schedules of timm's read.
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
