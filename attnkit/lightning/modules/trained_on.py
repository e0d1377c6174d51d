"""A record of the items that a module was trained on, so that a test of it can leave them out."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor


class KnowsItsTraining(LightningModule):
    """A module that remembers, also in checkpoints, a key of each item that it was trained on.

    The data module's method `training_keys()` returns the keys of the train and val splits, int64
    [items]. Keys accumulate if a training continues or starts from the weights of another.

    Attributes:
        trained_on: the keys, sorted; None: no training, or none with keys.
        has_unknown: whether a part of its training is unknown, as with data without
            `training_keys()`, or with weights from a file without keys. Known keys stay.
    """

    trained_on: Tensor | None = None
    has_unknown: bool = False

    def on_train_start(self) -> None:
        super().on_train_start()
        keys_of_data = getattr(getattr(self.trainer, "datamodule", None), "training_keys", None)
        if keys_of_data is None:
            self.has_unknown = True
            return
        before = () if self.trained_on is None else (self.trained_on,)
        self.trained_on = torch.cat([*before, keys_of_data()]).unique()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trained_on is not None:
            checkpoint["trained_on"] = self.trained_on
        checkpoint["has_unknown_training"] = self.has_unknown

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.trained_on, self.has_unknown = training_of(checkpoint)


def training_of(checkpoint: Mapping[str, Any]) -> tuple[Tensor | None, bool]:
    """Return `trained_on` and `has_unknown` of a checkpoint; without keys, it is unknown."""
    keys = checkpoint.get("trained_on")
    return keys, checkpoint.get("has_unknown_training", False) or keys is None


def was_trained_on(module: Any, keys: Tensor) -> Tensor | None:
    """Return which of the items with these keys a module was trained on, bool; None: unknown."""
    known = getattr(module, "trained_on", None)
    return None if known is None else torch.isin(keys, known)


def unknown_part(module: Any) -> str:
    """Return an addition to a line on a test if keys are known, but not those of all trainings."""
    has = getattr(module, "has_unknown", False)
    return "; what else the module was trained on is not known" if has else ""
