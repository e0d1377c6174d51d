"""What a module was trained on, so that a test of it can leave that out."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor


class KnowsItsTraining(LightningModule):
    """Remembers, also in checkpoints, a key of each item that a training has seen.

    The data module tells them: a method `training_keys()` gives those of the train and val splits,
    int64 [items]. They add up where a training goes on or begins from the weights of another.

    Attributes:
        trained_on: the keys, sorted; None: of no training, or of none that told them.
        has_unknown: whether a part of its training is not known, as of data without
            `training_keys()`, or of weights from a file without keys. Keys that are known stay.
    """

    trained_on: Tensor | None = None
    has_unknown: bool = False

    def on_train_start(self) -> None:
        super().on_train_start()
        tell = getattr(getattr(self.trainer, "datamodule", None), "training_keys", None)
        if tell is None:
            self.has_unknown = True
            return
        before = () if self.trained_on is None else (self.trained_on,)
        self.trained_on = torch.cat([*before, tell()]).unique()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trained_on is not None:
            checkpoint["trained_on"] = self.trained_on
        checkpoint["has_unknown_training"] = self.has_unknown

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.trained_on, self.has_unknown = training_of(checkpoint)


def training_of(checkpoint: Mapping[str, Any]) -> tuple[Tensor | None, bool]:
    """`trained_on` and `has_unknown` by a checkpoint; without keys the training is unknown."""
    keys = checkpoint.get("trained_on")
    return keys, checkpoint.get("has_unknown_training", False) or keys is None


def was_trained_on(module: Any, keys: Tensor) -> Tensor | None:
    """Which of the items with these keys a module was trained on, bool; None: not known."""
    known = getattr(module, "trained_on", None)
    return None if known is None else torch.isin(keys, known)


def unknown_part(module: Any) -> str:
    """What to add to a line on a test where keys are known, but not of all trainings."""
    has = getattr(module, "has_unknown", False)
    return "; what else the module was trained on is not known" if has else ""
