"""The progress bar of a run."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks.progress.rich_progress import BatchesProcessedColumn
from rich import get_console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from attnkit.lightning._private import BarFromOne
from attnkit.lightning.callbacks.meter import last_figures
from attnkit.lightning.console import on_terminal

NARROW = 100  # columns of a terminal
SHORT = {"grad_norm": "grad", "samples_per_second": "per s"}


class Progress(BarFromOne):
    """Lightning's rich progress bar, on one line, and removed when the stage ends.

    Epochs count from 1. The last figures of `Meter`, if it is used, and metrics logged with
    `prog_bar=True` follow the bar, as many as fit. They are updated when `Meter` logs, so that no
    other step waits for the device. Without a terminal there is no bar.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._shown: tuple[object, dict[str, Any]] = (None, {})
        if not on_terminal():
            self.disable()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the description, the bar, the batches and the time that is left."""
        return [
            TextColumn("{task.description}"),
            BarColumn(bar_width=self._bar_width),
            BatchesProcessedColumn(style=self.theme.batch_progress),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        ]

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the figures that follow the bar."""
        steps = last_figures(trainer)
        if trainer.training and steps is not None and steps is self._shown[0]:
            return self._shown[1]
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        short = {SHORT.get(name, name): value for name, value in (steps or {}).items()}
        self._shown = (steps, self._as_fits(trainer, {**short, **metrics}))
        return self._shown[1]

    @property
    def _bar_width(self) -> int:
        return 8 if get_console().width < NARROW else 30

    def _as_fits(self, trainer: Trainer, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the figures as texts, as many as fit on the line."""
        batches = 2 * len(str(trainer.num_training_batches)) + 1
        epoch = len(f"Validation {trainer.max_epochs}")
        room = get_console().width - (epoch + self._bar_width + batches + len("0:00:00"))
        room -= 5  # columns are a space apart
        fitting = {}
        for name, value in metrics.items():
            text = _short(value) if isinstance(value, int | float) else str(value)
            room -= len(f"{name}: {text} ")
            if room < 0:
                break
            fitting[name] = text
        return fitting

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_test_end(trainer, pl_module)
        self.teardown(trainer, pl_module, "test")  # the module's table comes next


def _short(value: float) -> str:
    """Format a number as 0.612, 1234 or 12k."""
    if not 1000 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) < 9999.5 else f"{value / 1000:.0f}k"
