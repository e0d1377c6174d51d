"""The LightningModule that learns several labels, or numbers, of each image."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, R2Score
from torchmetrics.functional.classification import binary_precision_recall_curve

from attnkit.lightning.modules.classification import ClassScore, class_scores, show_class_scores
from attnkit.lightning.modules.values import AllValues, ValuesModule
from attnkit.lightning.protocols import Explained
from attnkit.tasks.image_classification.module import OfImages
from attnkit.tasks.images.sizes import Size, sides


class ImageValues(OfImages, ValuesModule):
    """Learns several labels, or numbers, of each image; see `ValuesModule`.

    Labels: each validation chooses for every label the threshold of its probability with the best
    F1, which a checkpoint keeps; the threshold is 0.5 if the validation images all have the label
    or all lack it. The test also logs `test/f1`, the mean over the labels that occur of F1 at these
    thresholds. Numbers: validation and test also log `r2`, the explained share of the variance, as
    a mean over the numbers.

    Args:
        model: images [batch, in_channels, height, width] to [batch, num_outputs]; a module, or its
            configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        target: "labels" or "numbers".
        num_outputs: number of labels or numbers of an image.
        class_names: their names, for tables; None: "0", "1", …
        image_size, interpolation, crop_pct, value_range, normalized_by, in_channels, mean, std:
            properties of the images, as in `ImageClassification`.

    Attributes:
        thresholds: [num_outputs], for labels: an image has a label from this probability on.
        class_scores: after a test, for labels: precision, recall and F1 of each.
        test_values: after a test, outputs and truth, [images, num_outputs] each.
    """

    level = "image"
    first_columns = ("path", "truth")
    thresholds: Tensor

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        target: Literal["labels", "numbers"],
        num_outputs: int,
        mean: Sequence[float],
        std: Sequence[float],
        class_names: Sequence[str] | None = None,
        image_size: Size | None = None,
        interpolation: str | None = None,
        crop_pct: float | None = None,
        value_range: Sequence[float] | None = None,
        normalized_by: Mapping[str, Sequence[float]] | None = None,
        in_channels: int = 3,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            scheduler,
            finetune,
            target=target,
            num_outputs=num_outputs,
            class_names=class_names,
        )
        how = interpolation, crop_pct, value_range, normalized_by
        self.expect_images(image_size, in_channels, mean, std, *how)
        if image_size is not None:
            self.example_input_array = torch.zeros(1, in_channels, *sides(image_size))
        self.outputs_name = "logits" if target == "labels" else "numbers"
        if target == "labels":
            self.register_buffer("thresholds", torch.full((num_outputs,), 0.5))
            self.not_averaged = ("thresholds",)  # the average of weights (EMA) leaves them out
            self.val_values = AllValues()
        self.all_test_values = AllValues()
        self.class_scores: list[ClassScore] = []
        self.test_values: tuple[Tensor, Tensor] | None = None

    def metrics(self) -> dict[str, Metric]:
        return super().metrics() | ({"r2": _R2()} if self.target == "numbers" else {})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, truth = batch
        if batch_idx == 0:
            self.look(images)
        return self.loss(self(images), truth)

    def evaluate(self, stage: str, outputs: Tensor, truth: Tensor) -> None:
        super().evaluate(stage, outputs, truth)
        if stage == "test":
            self.all_test_values.update(outputs.float(), truth)
        elif self.target == "labels":
            self.val_values.update(outputs.float(), truth)

    def on_validation_epoch_end(self) -> None:
        if self.target == "numbers":
            return
        outputs, truth = self.val_values.compute()
        self.val_values.reset()
        if self.trainer.state.fn == "fit":  # `Trainer.validate` changes nothing
            for place, (score, is_there) in enumerate(zip(outputs.T, truth.T, strict=True)):
                self.thresholds[place] = best_threshold(score.sigmoid(), is_there)

    def on_test_epoch_end(self) -> None:
        # All processes must call compute, which gathers.
        outputs, truth = self.test_values = self.all_test_values.compute()
        self.all_test_values.reset()
        if self.target == "numbers":
            return
        chosen, known = outputs.sigmoid() >= self.thresholds, ~truth.isnan()
        counts = [
            (found & known).sum(dim=0)
            for found in (chosen & (truth == 1), chosen & (truth == 0), ~chosen & (truth == 0))
        ]
        misses = (~chosen & (truth == 1)).sum(dim=0)
        stats = torch.stack([*counts, misses, (truth == 1).sum(dim=0)], dim=1)
        self.class_scores = class_scores(stats, self.class_names)
        there = [score.f1 or 0.0 for score in self.class_scores if score.support]
        self.log("test/f1", sum(there) / max(1, len(there)))

    def on_test_end(self) -> None:
        if self.trainer.is_global_zero and self.class_scores:
            show_class_scores(self.class_scores, "label")

    @torch.no_grad()
    def classify(self, images: Tensor) -> dict[str, list[Any]]:
        """Predict images [batch, in_channels, height, width], uint8 or float in [0, 1].

        Returns:
            lists with an entry per image: `labels`, the names of the labels at or above their
            threshold, and for up to 1,000 labels `p(<label>)`, the probability of each; or each
            number by its name.
        """
        outputs = self.outputs_of(images, self.num_outputs)
        found = self.columns(outputs)
        if self.target == "numbers":
            return found
        return {**found, "labels": self._names(outputs.sigmoid() >= self.thresholds)}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, list[Any]]:
        """Return `path` or `truth`, if the batch has them, and the result of `classify`.

        `truth` holds the names of the labels, or the numbers (one number without a list).
        """
        images, *rest = batch
        rows = self.classify(images)
        if not rest:
            return rows
        if not isinstance(rest[0], Tensor):
            return {"path": list(rest[0]), **rows}
        if self.target == "labels":
            return {"truth": self._names(rest[0] == 1), **rows}
        truth = rest[0].tolist()
        return {"truth": [row[0] if len(row) == 1 else row for row in truth], **rows}

    def explained(self, batch: Any) -> Explained:
        """Return the inputs of `attnkit.explain` for a batch; each label or number is explained."""
        made = super().explained(batch)
        made.truth, made.of = None, "sigmoid" if self.target == "labels" else "logit"
        return made

    def facts(self) -> dict[str, Any]:
        thresholds = {}
        if self.target == "labels":
            each = zip(self.class_names, self.thresholds.tolist(), strict=True)
            thresholds = {"thresholds": dict(each)}
        return {
            self.target: self.class_names,
            **thresholds,
            "preprocessing": self.preprocessing(),
        }

    def _names(self, chosen: Tensor) -> list[list[str]]:
        return [[self.class_names[n] for n in row.nonzero().flatten().tolist()] for row in chosen]


def best_threshold(scores: Tensor, truth: Tensor) -> float:
    """Return the threshold with the best F1, halfway to the next lower score; 0.5 unless there are
    samples of both 0 and 1.

    Args:
        scores: from 0 to 1, [samples]; a score at or above the threshold predicts 1.
        truth: 0, 1, or NaN, which does not count, [samples].
    """
    known = ~truth.isnan()
    labels = truth[known].long()
    if len(labels.unique()) < 2:
        return 0.5
    precision, recall, scores = binary_precision_recall_curve(scores[known], labels)
    f1 = 2 * precision * recall / (precision + recall).clamp_min(1e-12)
    best = int(f1[:-1].argmax())  # the last point belongs to no score
    lower = scores[best - 1] if best else torch.zeros(())
    return (float(scores[best]) + float(lower)) / 2


class _R2(R2Score):
    """R² of the samples whose numbers are all known; NaN if there are fewer than two.

    It is computed in double precision, because numbers far from 0 would lose their variance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_dtype(torch.float64)

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        known = ~truth.isnan().any(dim=1)
        super().update(outputs[known].double(), truth[known].double())

    def compute(self) -> Tensor:
        return super().compute() if self.total > 1 else self.residual.new_tensor(torch.nan)
