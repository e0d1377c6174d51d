"""The base class of tasks that log exact means of losses and metrics over the samples."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from attnkit.lightning import _private as private
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.checks import check_monitors
from attnkit.lightning.modules.module import TaskModule


class MeasuredModule(TaskModule):
    """A `TaskModule` whose loss and metrics are exact means over the samples of an epoch.

    A subclass calls `make_metrics` in its constructor, `log_train_loss` in training and
    `update_metrics` in validation and test.
    """

    class_names: list[str]
    learns = "classes"
    """What the names in `class_names` are of."""
    in_bar: tuple[str, ...] = ("accuracy", "mae")
    """The metrics that the progress bar and the line of an epoch show."""

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics, by their logged names."""
        raise NotImplementedError

    def make_metrics(self) -> None:
        """Make the metrics of training, validation and test."""
        self.train_loss, self.train_plain_loss = mean_of_losses(), mean_of_losses()
        self.val_metrics = nn.ModuleDict({"loss": mean_of_losses(), **self.metrics()})
        self.test_metrics = nn.ModuleDict({"loss": mean_of_losses(), **self.metrics()})

    def log_train_loss(self, losses: Tensor, plain: Tensor | None = None) -> None:
        """Log `train/loss`, the mean over the epoch of the losses [samples] of its batches.

        Args:
            losses: minimised losses, [samples].
            plain: plain cross-entropy, if `losses` is another loss; it is logged as
                `train/plain_loss`, which compares with `val/loss`.
        """
        self.train_loss.update(losses.detach())
        self._log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        if plain is not None:
            self.train_plain_loss.update(plain.detach())
            self._log("train/plain_loss", self.train_plain_loss, on_step=False, on_epoch=True)

    def update_metrics(self, stage: str, losses: Tensor, *batch: Tensor) -> None:
        """Add a batch to the metrics of `stage`, "val" or "test", and log them: its losses to
        `loss`, and what the others take."""
        for name, module in (self.val_metrics if stage == "val" else self.test_metrics).items():
            metric = cast(Metric, module)
            metric.update(*((losses,) if name == "loss" else batch))
            self._log(f"{stage}/{name}", metric, prog_bar=name in self.in_bar)

    def _log(self, name: str, metric: Metric, **options: Any) -> None:
        """Log a metric that is always logged with these options."""
        if not private.log_again(self, name, metric):
            self.log(name, metric, **options)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", None)
        if names and self.hparams.get("class_names") and list(names) != self.class_names:
            differing = next(
                (pair for pair in zip(self.class_names, names, strict=False) if pair[0] != pair[1]),
                (f"{len(self.class_names)} {self.learns}", f"{len(names)}"),
            )
            raise UserError(
                f"data: its {self.learns} are not those that the module was made for: "
                f"expected {differing[0]}, got {differing[1]}"
            )

    def on_fit_start(self) -> None:
        """Raise UserError if a callback or the schedule monitors a metric that is never logged, or
        takes its worst value for the best."""
        check_monitors(self, {f"val/{name}": each for name, each in self.val_metrics.items()})


def names_of(given: Sequence[str] | None, **counts: int) -> list[str]:
    """Return the names of classes or outputs, or their numbers; raise ValueError for another count.

    Args:
        given: the argument `class_names`.
        counts: their number, by the name of its argument.
    """
    ((name, count),) = counts.items()
    if given is not None and len(given) != count:
        raise ValueError(f"class_names: expected {count} ({name}), got {len(given)}")
    return list(given or map(str, range(count)))


def mean_of_losses() -> MeanMetric:
    """Return a metric that averages one value per sample over an epoch."""
    # A NaN must show in the result, and looking for one would stop the GPU at every step. With
    # "disable", torchmetrics 1.9 also ignores the weights of its values: give it one per sample.
    return MeanMetric(nan_strategy="disable")
