"""The progress bar of a run."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class Progress(RichProgressBar):
    """Lightning's rich progress bar without the version number of the log folder."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar: the metrics logged with `prog_bar=True`."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
