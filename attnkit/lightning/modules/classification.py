"""The base class of tasks that give each sample one of several classes."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassStatScores,
)

from attnkit.core.arguments import at_least
from attnkit.lightning.console import cell, say_table
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.measured import MeasuredModule, names_of

ClassWeights = Literal["balanced"] | Sequence[float] | Mapping[str, float]
_MAX_SHOWN = 40
MAX_CONFUSION_CLASSES = 1000
MAX_COLUMNS = 1000  # classes with a column each in predictions.csv


class ClassScore(NamedTuple):
    """The scores of one class; None where a ratio has no denominator.

    `support` is the number of samples of the class.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class ClassificationModule(MeasuredModule):
    """A `TaskModule` with the losses and metrics of classification; subclasses define the steps.

    At the end of an epoch it logs exact means over the samples, under any number of processes:
    `train/loss`, and for validation and test `val/loss`, `val/accuracy`, `val/balanced_accuracy`
    (the mean recall of the classes), `val/f1` (the mean F1 of the classes) and the metrics that a
    subclass adds in `metrics()`.

    A test ends with a table of precision, recall and F1 of each class on screen; they stay in
    `class_scores`, and the confusion matrix (true × predicted, up to 1,000 classes) in `confusion`.
    The callback `ClassReport` writes both to a folder.

    Args:
        model: see `TaskModule`.
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: names for tables and pictures; None: "0", "1", ….
        class_weights: factor of each class in the training loss: a list in the order of classes, a
            mapping from their names, or "balanced": samples / (classes · samples of the class),
            over the `train_labels` of the data. The mean of a batch is over its samples, not over
            their weights. The subclass passes `class_weights` to its loss.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        class_weights: ClassWeights | None = None,
    ) -> None:
        super().__init__(model, optimizer, scheduler, finetune)
        at_least(2, num_classes=num_classes)
        self.num_classes = num_classes
        self.class_names = names_of(class_names, num_classes=num_classes)
        self.is_balanced = isinstance(class_weights, str) and class_weights == "balanced"
        given = None if self.is_balanced else class_weights
        weights = None if given is None else _checked_weights(given, self.class_names)
        self.register_buffer("class_weights", weights, persistent=False)
        self.make_metrics()
        options: dict[str, Any] = {"num_classes": num_classes, "validate_args": False}
        self.test_scores = MulticlassStatScores(average=None, **options)
        self.test_confusion = (
            MulticlassConfusionMatrix(**options) if num_classes <= MAX_CONFUSION_CLASSES else None
        )
        self.class_scores: list[ClassScore] = []
        self.confusion: Tensor | None = None

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics of logits [samples, num_classes] and labels, by their logged names.

        It is called once for validation and once for the test; `loss` is added to them.
        """
        options: dict[str, Any] = {"num_classes": self.num_classes, "validate_args": False}
        return {
            "accuracy": MulticlassAccuracy(average="micro", **options),
            "balanced_accuracy": BalancedAccuracy(average=None, **options),
            "f1": MulticlassF1Score(average="macro", **options),
        }

    def evaluate(self, stage: str, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the metrics of `stage`, "val" or "test".

        Args:
            stage: the stage whose metrics are updated.
            logits: [samples, num_classes].
            labels: [samples].
        """
        logits = logits.float()
        losses = functional.cross_entropy(logits, labels, reduction="none")
        self.update_metrics(stage, losses, logits, labels)
        if stage == "test":
            predicted = logits.argmax(dim=1)
            self.test_scores.update(predicted, labels)
            if self.test_confusion is not None:
                self.test_confusion.update(predicted, labels)

    def on_train_start(self) -> None:
        super().on_train_start()
        if not self.is_balanced:
            return
        counts = self.class_counts()
        if counts is None:
            raise UserError(
                "module.class_weights: the data do not say how many samples each class has "
                "(train_labels); give a list of weights"
            )
        weights = counts.sum() / (self.num_classes * counts.clamp_min(1))
        self.class_weights = weights.float().to(self.device)

    def class_counts(self) -> Tensor | None:
        """Return the number of training samples of each class; None if the data do not tell."""
        labels = getattr(getattr(self.trainer, "datamodule", None), "train_labels", None)
        return None if labels is None else torch.bincount(labels, minlength=self.num_classes)

    def on_test_epoch_end(self) -> None:
        # Every process takes part in the sums.
        self.class_scores = class_scores(self.test_scores.compute(), self.class_names)
        self.test_scores.reset()
        if self.test_confusion is not None:
            self.confusion = self.test_confusion.compute().cpu()
            self.test_confusion.reset()

    def on_test_end(self) -> None:
        if self.trainer.is_global_zero:
            show_class_scores(self.class_scores)


class BalancedAccuracy(MulticlassStatScores):
    """The mean recall of the classes that have samples, as in scikit-learn."""

    higher_is_better = True

    def compute(self) -> Tensor:
        hits, _, _, _, support = super().compute().unbind(dim=-1)
        return (hits[support > 0] / support[support > 0]).mean()


def _checked_weights(given: Any, class_names: Sequence[str]) -> Tensor:
    """Return the weights in the order of the classes; raise ValueError unless each has one."""
    if isinstance(given, Mapping):
        by_name = {str(name): weight for name, weight in given.items()}
        unknown = [name for name in by_name if name not in class_names]
        missing = [name for name in class_names if name not in by_name]
        if unknown or missing:
            wrong = f"unknown {unknown[0]!r}" if unknown else f"none of {missing[0]!r}"
            classes = ", ".join(class_names[:5]) + ", …" * (len(class_names) > 5)
            raise ValueError(f"class_weights: expected one for each of {classes}, got {wrong}")
        given = [by_name[name] for name in class_names]
    try:
        numbers = [] if isinstance(given, str) else [float(weight) for weight in given]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or not all(0 <= weight < inf for weight in numbers):
        raise ValueError(
            f"class_weights: expected 'balanced' or numbers of 0 or more, got {given!r}"
        )
    if len(numbers) != len(class_names):
        raise ValueError(
            f"class_weights: expected {len(class_names)} (num_classes), got {len(numbers)}"
        )
    return torch.tensor(numbers)


def probability_columns(
    class_names: Sequence[str], probabilities: Tensor
) -> dict[str, list[float]]:
    """Return columns `p(<class>)` of probabilities [samples, classes]; none for over 1,000."""
    if len(class_names) > MAX_COLUMNS:
        return {}
    columns = zip(class_names, probabilities.T.tolist(), strict=True)
    return {f"p({name})": column for name, column in columns}


def class_scores(stats: Tensor, class_names: Sequence[str]) -> list[ClassScore]:
    """Return scores from counts [classes, 5]: true positives, false positives, true negatives,
    false negatives, support."""
    scores = []
    for name, (hits, false, _, misses, support) in zip(class_names, stats.tolist(), strict=True):
        precision, recall = _ratio(hits, hits + false), _ratio(hits, hits + misses)
        f1 = _ratio(2 * hits, 2 * hits + false + misses)
        scores.append(ClassScore(name, precision, recall, f1, int(support)))
    return scores


def show_class_scores(scores: Sequence[ClassScore], kind: str = "class") -> None:
    """Print a table on screen and in run.log; of many classes, those with samples and the lowest F1
    come first and the rest is left out."""
    shown = list(scores)
    title = f"test, per {kind}"
    if len(scores) > _MAX_SHOWN:
        worst = sorted(scores, key=lambda s: (not s.support, -1.0 if s.f1 is None else s.f1))
        shown = worst[:_MAX_SHOWN]
        title += f": the {_MAX_SHOWN} of {len(scores)} with the lowest F1"
    table = Table(title=title)
    table.add_column(kind)
    for column in scores[0]._fields[1:]:
        table.add_column(column, justify="right")
    for score in shown:
        texts = ["–" if ratio is None else f"{100 * ratio:.1f} %" for ratio in score[1:-1]]
        table.add_row(cell(score.name), *texts, str(score.support))
    say_table(table)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
