"""TensorBoard, with epochs that count from 1."""

from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from attnkit.lightning.loggers.counting import from_one


class TensorBoard(TensorBoardLogger):
    """Lightning's `TensorBoardLogger`, except that the first epoch is 1, as in all other files."""

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(from_one(metrics), step)
