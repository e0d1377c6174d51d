"""An exponential moving average of the weights, for evaluation and checkpoints."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

from attnkit.core.arguments import share


class EMA(WeightAveraging):
    """Evaluates and saves averaged weights: average ← d · average + (1 - d) · weights every step.

    Here d = min(decay, (1 + n) / (10 + n)) at the n-th update, as in TensorFlow's
    `ExponentialMovingAverage`, so that a short run is not held to its first weights.

    It is Lightning's `WeightAveraging`: validation runs on the average, and checkpoints hold the
    average as `state_dict` and the trained weights, for resuming, as `current_model_state`.
    Differences from `EMAWeightAveraging` of Lightning 2.6:

    - `trainer.test(ckpt_path="best")` after `fit` tests the average. Lightning puts the trained
      weights back, and the test's figures are not those of the checkpoint.
    - After an error in validation the trained weights are put back before anything is saved.
    - The average lives on the device of training, and one fused update serves all tensors.

    Integer buffers are copied, not averaged. So are the buffers that a module chooses in validation
    and names in the tuple `not_averaged`: they belong to the average, which was validated. Sharded
    strategies (FSDP) are not supported.

    Args:
        decay: limit of d, in [0, 1).
    """

    def __init__(self, decay: float = 0.999) -> None:
        share(decay=decay)
        self.decay = decay
        self._swapped = False
        super().__init__(multi_avg_fn=self._average)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._device is None:
            # The module itself is moved to the device only later.
            self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    @torch.no_grad()
    def _average(self, averages: Any, weights: Any, num_averaged: Any) -> None:
        num_averaged = int(num_averaged)
        decay = min(self.decay, (1 + num_averaged) / (10 + num_averaged))
        if averages[0].is_floating_point() or averages[0].is_complex():
            get_ema_multi_avg_fn(decay)(averages, weights, None)
        else:  # torch's function would average integers too
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(weight)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._swapped = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self._swapped = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run after the module's own end of the epoch and before checkpoints are saved."""
        if self._average_model is not None:
            for name in getattr(pl_module, "not_averaged", ()):
                # Equal values stay equal when they are averaged.
                self._average_model.module.get_buffer(name).copy_(pl_module.get_buffer(name))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._swapped:
            self.on_validation_epoch_end(trainer, pl_module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Outside of fit the average is needed, and is loaded already.
        if trainer.state.fn == "fit":
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
