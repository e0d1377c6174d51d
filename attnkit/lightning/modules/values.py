"""The base class of tasks that give each sample several labels, or numbers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from attnkit.core.arguments import at_least, choice
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.classification import probability_columns
from attnkit.lightning.modules.measured import MeasuredModule, names_of


class ValuesModule(MeasuredModule):
    """A `TaskModule` that learns several labels, or numbers, of each sample; NaN is ignored.

    - "labels": each 0 or 1; binary cross-entropy of logits. Logged for validation and test:
      `accuracy`, the share of right labels, `micro_f1`, the F1 over all labels of all samples
      together, and `auroc` and `average_precision`, the means over the labels that have both 0 and
      1 (NaN if none has).
    - "numbers": the absolute error, in units of each number's deviation over `train_labels` of the
      data. The module returns numbers in the units of the data. Logged: `mae` and `rmse`, in these.

    `train/loss`, `val/loss` and `test/loss` are means over all known values; everything is exact
    under any number of processes.

    Args:
        model: maps samples to [samples, num_outputs]; see `TaskModule`.
        optimizer, scheduler, finetune: see `TaskModule`.
        target: "labels" or "numbers".
        num_outputs: number of labels or numbers of a sample.
        class_names: names of these, for tables; None: "0", "1", ….
    """

    level: str
    """The value of `level` with which classes are learned instead."""
    first_columns: tuple[str, ...]
    """The columns of predictions.csv before those of the learned values."""
    target_mean: Tensor
    target_deviation: Tensor

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        target: Literal["labels", "numbers"],
        num_outputs: int,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if target is None or str(target) == "classes":  # the default of data
            raise UserError(
                f"data.target: expected labels or numbers, which {type(self).__name__} learns, got "
                f"classes; level={self.level} learns classes"
            )
        super().__init__(model, optimizer, scheduler, finetune)
        choice(("labels", "numbers"), target=target)
        at_least(1, num_outputs=num_outputs)
        self.target = self.learns = target
        self.num_outputs = num_outputs
        self.class_names = names_of(class_names, num_outputs=num_outputs)
        first = getattr(self, "first_columns", ()) if target == "numbers" else ()
        counts = Counter([*self.class_names, *first])
        if twice := [name for name, times in counts.items() if times > 1]:
            raise ValueError(
                "class_names: expected names that differ, also from the columns "
                f"{' and '.join(self.first_columns)} of predictions.csv, got {twice[0]!r}; rename "
                "it in the data"
            )
        if target == "numbers":  # statistics of the training data, for predictions in its units
            self.register_buffer("target_mean", torch.zeros(num_outputs))
            self.register_buffer("target_deviation", torch.ones(num_outputs))
        self.make_metrics()

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics of outputs and truth [samples, num_outputs], by their logged names.

        It is called once for validation and once for the test; `loss` is added to them.
        """
        if self.target == "labels":
            return {
                "accuracy": MeanOfKnown(_is_right),
                "micro_f1": MicroF1(),
                "auroc": MeanOverLabels(binary_auroc),
                "average_precision": MeanOverLabels(binary_average_precision),
            }
        return {
            "mae": MeanError(functional.l1_loss),
            "rmse": MeanError(functional.mse_loss, root=True),
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs: logits of labels, or numbers in the units of the data."""
        return self.in_units(super().forward(*args, **kwargs))

    def in_units(self, outputs: Tensor) -> Tensor:
        """Convert the model's outputs as `forward` does: numbers to the units of the data."""
        if self.target == "labels":
            return outputs
        return outputs * self.target_deviation + self.target_mean

    def loss(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Return and log the minimised loss of a batch; 0 for a batch without known values."""
        losses = self.losses(outputs, truth)
        self.log_train_loss(losses)
        return losses.sum() / max(1, losses.numel())

    def columns(self, outputs: Tensor) -> dict[str, list[Any]]:
        """Return the probability of each label as `p(<label>)`; for more than 1,000 labels a column
        `labels`, with those above 0.5 and their probability; or each number by its name."""
        outputs = outputs.float()
        if self.target == "labels":
            rows, names = outputs.sigmoid().cpu(), self.class_names
            likely = ((row > 0.5).nonzero().flatten().tolist() for row in rows)
            return probability_columns(names, rows) or {
                "labels": [
                    [(names[place], float(row[place])) for place in places]
                    for row, places in zip(rows, likely, strict=True)
                ]
            }
        return dict(zip(self.class_names, outputs.T.tolist(), strict=True))

    def meaning(self) -> str:
        """Describe the outputs of an exported program."""
        if self.target == "labels":
            return "logits of the labels: the logistic function makes probabilities of them"
        return "numbers, in the units of the data"

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Return the loss of each known value, [values], of outputs and truth."""
        known = ~truth.isnan()
        outputs, truth = outputs.float(), torch.where(known, truth, 0.0)
        if self.target == "labels":
            found = functional.binary_cross_entropy_with_logits(outputs, truth, reduction="none")
        else:
            found = (outputs - truth).abs() / self.target_deviation
        return found[known]

    def evaluate(self, stage: str, outputs: Tensor, truth: Tensor) -> None:
        """Add a batch, outputs and truth [samples, num_outputs], to the metrics of "val" or
        "test"."""
        outputs = outputs.float()
        self.update_metrics(stage, self.losses(outputs, truth), outputs, truth)

    def on_fit_start(self) -> None:
        """Set the mean and deviation of numbers in training, after the checks of monitors."""
        super().on_fit_start()
        truth = getattr(getattr(self.trainer, "datamodule", None), "train_labels", None)
        if self.target == "labels" or truth is None:
            return
        truth = truth.to(self.target_mean)
        mean = truth.nanmean(dim=0)
        deviation = (truth - mean).square().nanmean(dim=0).sqrt()
        self.target_mean.copy_(mean)
        self.target_deviation.copy_(torch.where(deviation > 0, deviation, 1.0))


def _is_right(outputs: Tensor, truth: Tensor, reduction: str) -> Tensor:
    """Return 1 where the more probable label is the true one, else 0."""
    return ((outputs > 0) == truth).float()


class MeanOfKnown(Metric):
    """The mean of a function of outputs and truth over all known values.

    Args:
        of: function such as torch's `l1_loss`, of outputs, truth [values] and reduction="none".
        root: whether to take the square root of the mean.
    """

    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, of: Callable[..., Tensor], *, root: bool = False) -> None:
        super().__init__()
        self.of = of
        self.root = root
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        known = ~truth.isnan()
        self.total += self.of(outputs[known], truth[known], reduction="none").sum()
        self.count += known.sum()

    def compute(self) -> Tensor:
        mean = self.total / self.count
        return mean.sqrt() if self.root else mean


class MeanError(MeanOfKnown):
    """A `MeanOfKnown` of a function that is better the lower it is."""

    higher_is_better = False


class MicroF1(Metric):
    """2 · correctly predicted ones / (predicted ones + true ones) over all known labels of all
    samples; a logit above 0 predicts a one. The metric is 0 without ones."""

    full_state_update = False
    higher_is_better = True
    right: Tensor
    counted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("counted", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        predicted, right = (outputs > 0) & ~truth.isnan(), truth == 1
        self.right += (predicted & right).sum()
        self.counted += predicted.sum() + right.sum()

    def compute(self) -> Tensor:
        return 2 * self.right / self.counted.clamp(min=1)


class AllValues(Metric):
    """All outputs and truths of a stage, [samples, num_outputs] each, in the order of the ranks."""

    full_state_update = False
    outputs: list[Tensor]
    truth: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("truth", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        self.outputs.append(outputs.detach())
        self.truth.append(truth)

    def compute(self) -> Any:
        return tuple(
            torch.cat(part) if isinstance(part, list) else part
            for part in (self.outputs, self.truth)
        )


class MeanOverLabels(AllValues):
    """The mean of a score over those labels that have samples of 0 and of 1; NaN if none has.

    Args:
        score: function of logits [samples] and labels [samples], such as `binary_auroc`.
    """

    higher_is_better = True

    def __init__(self, score: Callable[..., Tensor]) -> None:
        super().__init__()
        self.score = score

    def compute(self) -> Tensor:
        outputs, truth = super().compute()
        scores = []
        for given, right in zip(outputs.T, truth.T, strict=True):
            labels = right[~right.isnan()].long()
            if len(labels.unique()) == 2:
                scores.append(self.score(ranks_of(given[~right.isnan()]), labels))
        return torch.stack(scores).mean() if scores else outputs.new_tensor(torch.nan)


def ranks_of(outputs: Tensor) -> Tensor:
    """Return ranks from 0 to 1, in the order of the outputs. torchmetrics takes a sigmoid of values
    outside of 0 to 1, which makes large outputs equal."""
    ranks = outputs.unique(return_inverse=True)[1].double()
    return ranks / ranks.max().clamp(min=1)
