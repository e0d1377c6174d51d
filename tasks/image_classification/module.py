"""The LightningModule of image classification, and the base that `ImageValues` shares."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms import v2

from attnkit.core.arguments import at_least, share
from attnkit.lightning import ClassificationModule
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.classification import ClassWeights, probability_columns
from attnkit.lightning.modules.module import TaskModule
from attnkit.lightning.protocols import Explained
from attnkit.tasks.images.module import NormalizesImages
from attnkit.tasks.images.sizes import Size, sides

if TYPE_CHECKING:
    from attnkit.lightning.export import Program


class OfImages(NormalizesImages, TaskModule):
    """Base of modules that learn a target of each image: normalises, explains and exports.

    It is the first base of a module. The second, `ClassificationModule` or `ValuesModule`, defines
    the target.
    """

    class_names: list[str]
    outputs_name: str
    """Name of the output of the exported program."""
    evaluate: Callable[[str, Tensor, Tensor], None]  # defined in the second base
    meaning: Callable[[], str]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, num_classes], or numbers in their units.

        Args:
            images: a tensor, or a list of images of different sizes; uint8, float in [0, 1], or
                normalised by the data module (`normalized_by`).
        """
        return super().forward(self.normalized(images))

    def setup(self, stage: str) -> None:
        super().setup(stage)
        target = getattr(getattr(self.trainer, "datamodule", None), "target", None)
        mine = getattr(self, "target", "classes")
        if target is not None and target != mine:
            level = "image" if target == "classes" else "image_values"
            raise UserError(
                f"data.target={target}: {type(self).__name__} learns {mine}; level={level} learns "
                f"{target}"
            )

    def outputs_of(self, images: Tensor, num_outputs: int) -> Tensor:
        """Return `forward(images)` in float32; zero rows if no file of the batch could be read."""
        # Not every model takes an empty batch.
        return self(images).float() if len(images) else self.mean.new_zeros((0, num_outputs))

    def explained(self, batch: Any) -> Explained:
        """Return the inputs of `attnkit.explain` for a batch: this module, and images as floats, in
        a list if they differ in size."""
        images, *rest = batch
        if isinstance(images, list) and len({image.shape for image in images}) == 1:
            images = torch.stack(images)
        inputs: Any
        pictures: Any
        if isinstance(images, list):
            inputs = [self.as_floats(image) for image in images]
            pictures = [self.as_pictures(image) for image in inputs]
        else:
            inputs = self.as_floats(images)
            pictures = self.as_pictures(inputs)
        made = Explained(self, inputs, pictures=pictures, class_names=self.class_names)
        if made.has_sizes:
            made.notes.append("images of different sizes: each has its own grid and its own scale")
        if rest and isinstance(rest[0], Tensor):
            made.truth = rest[0]
        elif rest:
            made.names = list(rest[0])
        return made

    def programs(self) -> dict[str, "Program"]:
        """Return the program to export, unless images may have any size."""
        if self.image_size is None:
            return {}
        return self.program(self.outputs_name, [len(self.class_names)], self.meaning())

    def look(self, images: Tensor) -> None:
        """Record whether the data module normalises: files to predict must then be normalised
        too."""
        if self.normalized_by is not None or not images.is_floating_point():
            return
        if images.min() < -0.01 or images.max() > 1.01:
            self.normalized_by = self.hparams["normalized_by"] = {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.normalized_by is None:
            self.normalized_by = checkpoint.get("hyper_parameters", {}).get("normalized_by")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, truth = batch
        self.evaluate("val", self(images), truth)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, truth = batch
        self.evaluate("test", self(images), truth)


class ImageClassification(OfImages, ClassificationModule):
    """Classifies images, one label each: cross-entropy, top-1 and top-5 accuracy, class scores.

    The module normalises images itself, so that a checkpoint carries its preprocessing. It logs
    what `ClassificationModule` does, and with more than five classes also `val/top5_accuracy` and
    `test/top5_accuracy` (with five or fewer they would always be 1). `train/loss` is the minimised
    loss, with smoothing and mixing; the other losses are plain cross-entropy. With smoothing or
    mixing, `train/plain_loss` is the training loss without smoothing (but of mixed images).

    Args:
        model: images [batch, in_channels, height, width] to logits [batch, num_classes]; a module,
            or its configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: names for tables and pictures; None: "0", "1", …
        image_size: side of the images in pixels, or [height, width], by which images to predict are
            prepared.
        interpolation, crop_pct, value_range: how images were resized to it (see `ImageDataModule`).
        normalized_by: `mean` and `std` with which the data module normalises its batches of floats;
            empty if they are not known. Floats are then taken as they are.
        in_channels: 1 (grey) or 3 (RGB).
        max_image_tokens: batches are lists of images of different sizes, each of at most this many
            patches (`native` of `ImageFolderData`); None: all images have one size.
        mean: mean of the training pixels, scaled to [0, 1], per channel.
        std: standard deviation of the training pixels, per channel.
        class_weights: see `ClassificationModule`.
        label_smoothing: share of the target that is spread over all classes (Szegedy et al., 2016).
        mixup: α of mixup's Beta(α, α) (Zhang et al., 2018); 0: none.
        cutmix: α of CutMix (Yun et al., 2019); 0: none. With both, each batch gets one of them.
    """

    outputs_name = "logits"

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        class_names: Sequence[str] | None = None,
        image_size: Size | None = None,
        interpolation: str | None = None,
        crop_pct: float | None = None,
        value_range: Sequence[float] | None = None,
        normalized_by: Mapping[str, Sequence[float]] | None = None,
        in_channels: int = 3,
        max_image_tokens: int | None = None,
        label_smoothing: float = 0.0,
        class_weights: ClassWeights | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            scheduler,
            finetune,
            num_classes=num_classes,
            class_names=class_names,
            class_weights=class_weights,
        )
        how = interpolation, crop_pct, value_range, normalized_by
        self.expect_images(image_size, in_channels, mean, std, *how)
        at_least(1, max_image_tokens=max_image_tokens)
        self.max_image_tokens = max_image_tokens
        share(label_smoothing=label_smoothing)
        at_least(0, mixup=mixup, cutmix=cutmix)
        if image_size is not None:
            self.example_input_array = torch.zeros(1, in_channels, *sides(image_size))
        self.label_smoothing = label_smoothing
        alphas = {v2.MixUp: mixup, v2.CutMix: cutmix}
        mixers = [mix(alpha=a, num_classes=num_classes) for mix, a in alphas.items() if a]
        self.mix = v2.RandomChoice(mixers) if mixers else None

    @staticmethod
    def describe_data(data: LightningDataModule) -> dict[str, Any]:
        """Describe a data module that has no `describe()`; see `describe_batches`."""
        from attnkit.tasks.image_classification.describe import describe_batches

        return describe_batches(data)

    @torch.no_grad()
    def classify(self, images: Tensor) -> dict[str, list[Any]]:
        """Classify images [batch, in_channels, height, width], uint8 or float in [0, 1].

        Returns:
            lists with an entry per image: `label` (the name of the most probable class),
            `probability`, `top5` (up to five pairs of name and probability, best first), and for up
            to 1,000 classes `p(<class>)`, the probability of each.
        """
        probabilities = self.outputs_of(images, self.num_classes).softmax(dim=1)
        best = probabilities.topk(min(5, self.num_classes), dim=1)
        top5 = [
            [(self.class_names[number], value) for number, value in zip(*row, strict=True)]
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return {
            "label": [row[0][0] for row in top5],
            "probability": [row[0][1] for row in top5],
            "top5": top5,
            **probability_columns(self.class_names, probabilities),
        }

    def _truths(self, paths: Sequence[str]) -> list[str]:
        """Return for each file the class whose folder it lies in, or ""."""
        folders = [Path(path).parent.name for path in paths]
        return [name if name in self.class_names else "" for name in folders]

    def facts(self) -> dict[str, Any]:
        return {"classes": self.class_names, "preprocessing": self.preprocessing()}

    def meaning(self) -> str:
        """Describe the output of an exported program."""
        return "softmax makes probabilities of them"

    def metrics(self) -> dict[str, Metric]:
        metrics = super().metrics()
        if self.num_classes > 5:
            metrics["top5_accuracy"] = MulticlassAccuracy(
                self.num_classes, top_k=5, average="micro", validate_args=False
            )
        return metrics

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        if batch_idx == 0:
            for some in images if isinstance(images, list) else [images]:
                self.look(some)
        images = self.normalized(images)
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        logits = self.model(images)
        losses = self.losses(logits, labels)
        plain = None
        changed = self.label_smoothing or self.class_weights is not None
        if self.mix is not None or changed:  # kept for mixed images too
            with torch.no_grad():
                plain = functional.cross_entropy(logits.float(), labels, reduction="none")
        self.log_train_loss(losses, plain)
        return losses.mean()

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample; training minimises their mean.

        Args:
            logits: [samples, num_classes].
            labels: int64 [samples], or the shares of the classes, [samples, num_classes].
        """
        return functional.cross_entropy(
            logits.float(),
            labels,
            self.class_weights,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, list[Any]]:
        """Predict a batch; lists have one entry per image.

        Returns:
            the result of `classify`; `path`, if the batch has paths; and if it is known, `truth`:
            the class in the batch, or the class whose folder a file lies in.
        """
        images, *rest = batch
        rows = self.classify(images)
        if not rest:
            return rows
        if isinstance(rest[0], Tensor):
            if list(rest[0].shape) != [len(images)] or rest[0].is_floating_point():
                return rows
            return {"truth": [self.class_names[number] for number in rest[0].tolist()], **rows}
        paths = list(rest[0])
        truths = self._truths(paths)
        known = {"truth": truths} if any(truths) else {}
        return {"path": paths, **known, **rows}
