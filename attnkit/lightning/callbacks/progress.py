"""What is shown while a run goes on: the data, a line for each epoch, and the progress bar."""

import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.progress.rich_progress import BatchesProcessedColumn
from rich import get_console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from attnkit.lightning._private import BarFromOne
from attnkit.lightning.best import rank, validation
from attnkit.lightning.callbacks.meter import last_figures
from attnkit.lightning.console import on_terminal, say, seconds, three_digits

MANY = 100  # epochs above which not each gets a line
NARROW = 100  # columns of a terminal
SHORT = {"grad_norm": "grad", "samples_per_second": "per s"}


class DataSummary(Callback):
    """Prints the data when `fit` starts: the lines that `summary()` of the data module returns, if
    it has one, on screen and in run.log.

    attnkit's data modules list the samples of each split and class, how uneven the classes are, and
    the size, channels, mean and deviation of images.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        summary = getattr(data, "summary", None)
        if callable(summary) and trainer.is_global_zero:
            for line in summary():
                say(line)


class EpochLines(Callback):
    """Prints a line for each epoch, on screen and in run.log:

        epoch 3/40  loss 1.23  val/loss 1.31, accuracy 0.512  lr 0.00098  12.3 s  best

    The line has the training loss; for validation the loss, the metric that the checkpoint monitors
    and those logged with `prog_bar=True`; the learning rate at the end; the seconds with
    validation; and `best` if the epoch is the best so far, else `best: 2`, by the metric of the
    checkpoint and, for ties, the smaller `val/loss`.
    Runs of more than 100 epochs print at most one line a second.

    Where the output is not a terminal, progress is also printed every few seconds.

    Args:
        every_seconds: longest time without a line, where the output is not a terminal.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.every_seconds = every_seconds
        self.best: dict[str, float] = {}
        """The best epoch so far: `epoch`, counted from 1, and the metrics of its validation."""
        self._watched = True
        self._last = self._began = time.monotonic()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._watched = on_terminal() and trainer.progress_bar_callback is not None
        self._last = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitored = self._judge(trainer)
        now = time.monotonic()
        last = trainer.max_epochs or -1
        is_last = trainer.current_epoch + 1 == last
        if not is_last and not 0 < last <= MANY and now - self._last < 1:
            return
        parts = [_epoch(trainer), *_metrics(trainer, monitored)]
        rates = [float(group["lr"]) for opt in trainer.optimizers for group in opt.param_groups]
        steps = last_figures(trainer) or {}
        if rates:
            parts.append(f"lr {steps.get('lr', max(rates)):.2g}")
        parts.append(seconds(now - self._began))
        if self.best.get("epoch") == trainer.current_epoch + 1:
            parts.append("best")
        elif self.best:
            parts.append(f"best: {self.best['epoch']:.0f}")
        self._say(trainer, "  ".join(parts))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._judge(trainer)

    def _judge(self, trainer: Trainer) -> str:
        """Note the validation if it is the best so far; return the metric of the checkpoint."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor:
                monitor, mode = callback.monitor, callback.mode
                if monitor in trainer.callback_metrics:
                    found = validation(trainer.callback_metrics, monitor)
                    if not self.best or rank(found, monitor, mode) < rank(self.best, monitor, mode):
                        self.best = {**found, "epoch": trainer.current_epoch + 1}
                return monitor
        return ""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_silent():
            last = last_figures(trainer) or {}
            figures = "".join(f", {name} {value:.3g}" for name, value in last.items())
            batches = trainer.num_training_batches
            self._say(trainer, f"{_epoch(trainer)}, batch {batch_idx + 1}/{batches}{figures}")

    def _evaluating(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_silent():
            stages = {"validation": trainer.validating, "test": trainer.testing}
            stage = next((name for name, now in stages.items() if now), "prediction")
            epoch = f"{_epoch(trainer)}, " if trainer.state.fn == "fit" else ""
            self._say(trainer, f"{epoch}{stage}, batch {batch_idx + 1}")

    on_validation_batch_end: Any = _evaluating
    on_test_batch_end: Any = _evaluating
    on_predict_batch_end: Any = _evaluating

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])

    def _is_silent(self) -> bool:
        return not self._watched and time.monotonic() - self._last >= self.every_seconds

    def _say(self, trainer: Trainer, line: str) -> None:
        self._last = time.monotonic()
        if trainer.is_global_zero:
            say(line)


def _epoch(trainer: Trainer) -> str:
    last = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{last}"


def _metrics(trainer: Trainer, monitored: str) -> list[str]:
    """Return the training loss and the validation figures to show."""
    found = trainer.callback_metrics
    parts = [f"loss {three_digits(float(found['train/loss']))}"] if "train/loss" in found else []
    if "train/plain_loss" in found:
        parts[0] += f" (plain {three_digits(float(found['train/plain_loss']))})"
    known = {"val/loss": 0, monitored: 0} | dict.fromkeys(trainer.progress_bar_metrics, 0)
    shown = [name for name in known if name.startswith("val/") and name in found]
    if shown:
        figures = [
            f"{name.removeprefix('val/')} {three_digits(float(found[name]))}" for name in shown
        ]
        parts.append(f"val/{', '.join(figures)}")
    return parts


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
