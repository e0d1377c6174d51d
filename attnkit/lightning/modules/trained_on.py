"""What a module was trained on, so that a test of it can leave that out."""

from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor


class KnowsItsTraining(LightningModule):
    """Remembers, also in checkpoints, a key of each item that a training has seen.

    The data module tells them: a method `training_keys()` gives those of the train and val splits,
    int64 [items]. They add up where a training goes on or begins from the weights of another.

    Attributes:
        trained_on: the keys, sorted; None: not known, as of a module that was not trained, or of
            data without `training_keys()`.
    """

    trained_on: Tensor | None = None

    def on_train_start(self) -> None:
        super().on_train_start()
        tell = getattr(getattr(self.trainer, "datamodule", None), "training_keys", None)
        before = () if self.trained_on is None else (self.trained_on,)
        self.trained_on = torch.cat([*before, tell()]).unique() if tell else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trained_on is not None:
            checkpoint["trained_on"] = self.trained_on

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.trained_on = checkpoint.get("trained_on")


def was_trained_on(module: Any, keys: Tensor) -> Tensor | None:
    """Which of the items with these keys a module was trained on, bool; None: not known."""
    known = getattr(module, "trained_on", None)
    return None if known is None else torch.isin(keys, known)
