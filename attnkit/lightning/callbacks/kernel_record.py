"""A record of the attention kernels that run in training and evaluation."""

from contextlib import ExitStack
from functools import partialmethod
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from attnkit.core.kernels.record import KernelCounts, record_backends


class KernelRecord(Callback):
    """Records which attention kernel ran in each module, in the first batch of each stage.

    It sees every call of torch's attention, in attnkit's modules and in others. The table is
    printed (`verbose`), goes to loggers that take text (TensorBoard), and stays in `records`:
    `records["train"].counts["model.blocks.0.attention"]["flash"]`. `results` holds the totals as
    numbers, `kernels/train/flash`, which `ResultsFile` writes.

    A compiled model runs that one batch uncompiled, as operators in compiled code cannot be seen.

    Args:
        verbose: whether to print each table.
    """

    def __init__(self, verbose: bool = True) -> None:
        self.verbose = verbose
        self.records: dict[str, KernelCounts] = {}
        self._recording = ExitStack()
        self._stage: str | None = None

    @property
    def results(self) -> dict[str, float]:
        """The calls in the recorded batch, as `kernels/<stage>/<kernel>`."""
        return {
            f"kernels/{stage}/{kernel}": float(calls)
            for stage, record in self.records.items()
            for kernel, calls in record.total().items()
        }

    def _begin(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, stage: str, **kwargs: Any
    ) -> None:
        if stage not in self.records:
            self._stage = stage
            self.records[stage] = self._recording.enter_context(record_backends(pl_module))

    def _close(self, *args: Any, **kwargs: Any) -> None:
        self._recording.close()
        self._stage = None

    def _end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        stage = self._stage
        self._close()
        if stage is None or not trainer.is_global_zero:
            return
        table = str(self.records[stage])
        if self.verbose:
            rank_zero_info(f"attention kernels in the first {stage} batch\n{table}")
        for logger in trainer.loggers:
            writer = getattr(logger, "experiment", None)
            if writer is not None and hasattr(writer, "add_text"):
                writer.add_text(f"kernels/{stage}", f"```\n{table}\n```")

    on_train_batch_start: Any = partialmethod(_begin, stage="train")
    on_validation_batch_start: Any = partialmethod(_begin, stage="val")
    on_test_batch_start: Any = partialmethod(_begin, stage="test")
    on_predict_batch_start: Any = partialmethod(_begin, stage="predict")
    on_train_batch_end: Any = _end
    on_validation_batch_end: Any = _end
    on_test_batch_end: Any = _end
    on_predict_batch_end: Any = _end
    on_exception: Any = _close
    teardown: Any = _close
