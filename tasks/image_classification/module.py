"""The LightningModule of image classification; users subclass it or copy it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassStatScores,
)
from torchvision.transforms import v2

from attnkit.lightning import TaskModule, UserError
from attnkit.tasks.image_classification.report import (
    ClassScore,
    class_scores,
    show_class_scores,
)

MAX_CONFUSION_CLASSES = 1000


class ImageClassification(TaskModule):
    """One label per image: cross-entropy, top-1 and top-5 accuracy, scores per class.

    Normalises inside, so that a checkpoint carries its preprocessing. Logged at the end of an
    epoch, each the exact mean over its samples, under any number of processes: `train/loss`,
    `val/loss`, `val/accuracy`, `test/loss`, `test/accuracy`, and with more than five classes
    `val/top5_accuracy` and `test/top5_accuracy` (with five or fewer it would always be 1).
    `train/loss` is the loss that is minimised, with its smoothing and mixing; the others are plain
    cross-entropy.

    A test ends with a table of precision, recall and F1 of each class on screen; they stay in
    `class_scores`, and the confusion matrix (true × predicted, up to 1,000 classes) in `confusion`.
    The callback `ClassReport` writes both to a folder.

    Args:
        model: images [batch, in_channels, height, width] to logits [batch, num_classes]; a module,
            or its configuration (see `TaskModule`).
        optimizer: see `TaskModule`.
        scheduler: see `TaskModule`.
        num_classes: at least 2.
        class_names: for tables and pictures; "0", "1", … unless given.
        image_size: side of the images in pixels, for those who prepare images to predict.
        in_channels: 1 (grey) or 3 (RGB).
        mean: of the training pixels on the scale from 0 to 1, per channel.
        std: their standard deviation.
        label_smoothing: share of the target spread over all classes (Szegedy et al., 2016).
        mixup: α of mixup's Beta(α, α) (Zhang et al., 2018); 0: none.
        cutmix: α of CutMix (Yun et al., 2019); 0: none. With both, each batch gets one of them.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        class_names: Sequence[str] | None = None,
        image_size: int | None = None,
        in_channels: int = 3,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__(model, optimizer, scheduler)
        if num_classes < 2:
            raise ValueError(f"num_classes: expected 2 or more, got {num_classes}")
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(
                f"class_names: expected {num_classes} (num_classes), got {len(class_names)}"
            )
        for name, value in (("mean", mean), ("std", std)):
            if len(value) != in_channels:
                raise ValueError(f"{name}: expected {in_channels} (in_channels) numbers, {value}")
        if not all(0 < value < math.inf for value in std):
            raise ValueError(f"std: expected positive numbers, got {std}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected in [0, 1), got {label_smoothing}")
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if alpha < 0:
                raise ValueError(f"{name}: expected 0 or more, got {alpha}")
        self.num_classes = num_classes
        self.class_names = list(class_names or map(str, range(num_classes)))
        self.image_size = image_size
        self.in_channels = in_channels
        self.label_smoothing = label_smoothing
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1))
        mixers: list[nn.Module] = []
        if mixup:
            mixers.append(v2.MixUp(alpha=mixup, num_classes=num_classes))
        if cutmix:
            mixers.append(v2.CutMix(alpha=cutmix, num_classes=num_classes))
        self.mix = v2.RandomChoice(mixers) if mixers else None

        self.train_loss = _mean()
        self.val_metrics = self._metrics()
        self.test_metrics = self._metrics()
        options: dict[str, Any] = {"num_classes": num_classes, "validate_args": False}
        self.test_scores = MulticlassStatScores(average=None, **options)
        self.test_confusion = (
            MulticlassConfusionMatrix(**options) if num_classes <= MAX_CONFUSION_CLASSES else None
        )
        self.class_scores: list[ClassScore] = []
        self.confusion: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, num_classes] of images, uint8 or float from 0 to 1."""
        return self.model(self.normalized(images))

    def normalized(self, images: Tensor) -> Tensor:
        """(pixel - mean) / std, of uint8 pixels divided by 255 or floats taken as they are."""
        if not images.is_floating_point():
            images = images.to(self.mean.dtype) / 255
        return (images - self.mean) / self.std

    def setup(self, stage: str) -> None:
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", None)
        if names and self.hparams.get("class_names") and list(names) != self.class_names:
            differing = next(
                (pair for pair in zip(self.class_names, names, strict=False) if pair[0] != pair[1]),
                (f"{len(self.class_names)} classes", f"{len(names)}"),
            )
            raise UserError(
                "data: its classes are not those that the module was made for: "
                f"expected {differing[0]}, got {differing[1]}"
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        images = self.normalized(images)
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        logits = self.model(images)
        losses = functional.cross_entropy(
            logits.float(), labels, label_smoothing=self.label_smoothing, reduction="none"
        )
        self.train_loss.update(losses.detach())
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        logits, labels = self._evaluate("test", self.test_metrics, batch)
        predicted = logits.argmax(dim=1)
        self.test_scores.update(predicted, labels)
        if self.test_confusion is not None:
            self.test_confusion.update(predicted, labels)

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

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, list[Any]]:
        """Predictions of a batch, one list entry per image.

        Returns:
            `label` (the name of the most probable class), `probability`, `top5` (up to five pairs
            of name and probability, best first); and `path`, if the batch brought paths.
        """
        images, *rest = batch
        # A batch of files may turn out empty; not every model takes that.
        logits = self(images) if len(images) else images.new_zeros((0, self.num_classes)).float()
        probabilities = logits.float().softmax(dim=1)
        best = probabilities.topk(min(5, self.num_classes), dim=1)
        top5 = [
            [(self.class_names[number], value) for number, value in zip(*row, strict=True)]
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        rows: dict[str, list[Any]] = {
            "label": [row[0][0] for row in top5],
            "probability": [row[0][1] for row in top5],
            "top5": top5,
        }
        if rest and not isinstance(rest[0], Tensor):
            rows = {"path": list(rest[0]), **rows}
        return rows

    def _metrics(self) -> nn.ModuleDict:
        options: dict[str, Any] = {"num_classes": self.num_classes, "validate_args": False}
        metrics: dict[str, Metric] = {
            "loss": _mean(),
            "accuracy": MulticlassAccuracy(average="micro", **options),
        }
        if self.num_classes > 5:
            metrics["top5_accuracy"] = MulticlassAccuracy(top_k=5, average="micro", **options)
        return nn.ModuleDict(metrics)

    def _evaluate(self, stage: str, metrics: nn.ModuleDict, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self(images).float()
        for name, module in metrics.items():
            metric = cast(Metric, module)
            if name == "loss":
                metric.update(functional.cross_entropy(logits, labels, reduction="none"))
            else:
                metric.update(logits, labels)
            self.log(f"{stage}/{name}", metric, prog_bar=name == "accuracy")
        return logits, labels


def _mean() -> MeanMetric:
    # A NaN must show in the result, and looking for one would stop the GPU at every step. With
    # "disable", torchmetrics 1.9 also ignores the weights of its values: give it one per sample.
    return MeanMetric(nan_strategy="disable")
