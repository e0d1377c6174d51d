"""The LightningModule of semantic segmentation; users subclass it or copy it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from torchmetrics.classification import MulticlassJaccardIndex

from attnkit.core.arguments import at_least
from attnkit.lightning import ClassificationModule
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.classification import ClassWeights
from attnkit.lightning.protocols import Explained
from attnkit.tasks.images.decode import to_channels
from attnkit.tasks.images.module import NormalizesImages
from attnkit.tasks.images.sizes import Size, sides
from attnkit.tasks.segmentation.data import IGNORED, resized

if TYPE_CHECKING:
    from attnkit.lightning.export import Program


def slide(
    model: Callable[[Tensor], Tensor],
    images: Annotated[Tensor, "batch channels height width"],
    window: tuple[int, int],
    overlap: float = 0.25,
) -> Annotated[Tensor, "batch classes height width"]:
    """Return the mean of a model's logits over all windows that contain a pixel.

    Windows are spaced evenly, so that they overlap by at least the given share of their sides and
    the last one ends at the edge. An image smaller than the window is padded with its last row and
    column.

    Args:
        model: maps images of the window's size to logits of every pixel.
        images: images of one size.
        window: height and width of a window in pixels.
        overlap: share of a window's sides, from 0 to below 1.
    """
    height, width = images.shape[-2:]
    below, beside = max(0, window[0] - height), max(0, window[1] - width)
    if below or beside:  # replication padding needs floats
        grown = functional.pad(images.float(), (0, beside, 0, below), mode="replicate")
        images = grown.to(images.dtype)
    tops, lefts = (
        _starts(size, side, overlap) for size, side in zip(images.shape[-2:], window, strict=True)
    )
    total: Tensor | None = None
    for top in tops:
        for left in lefts:
            area = ..., slice(top, top + window[0]), slice(left, left + window[1])
            logits = model(images[area])
            if total is None:
                shape = (*logits.shape[:2], *images.shape[-2:])
                total, count = logits.new_zeros(shape), logits.new_zeros(shape[-2:])
            total[area] += logits
            count[area] += 1
    assert total is not None
    return (total / count)[..., :height, :width]


def _starts(size: int, side: int, overlap: float) -> list[int]:
    """Return the first pixels of evenly spaced windows along a side."""
    steps = -(-(size - side) // max(1, int(side * (1 - overlap))))
    return [round(n * (size - side) / max(1, steps)) for n in range(steps + 1)]


Logits = Annotated[Tensor, "batch classes height width"]
Masks = Annotated[Tensor, "batch height width", int]


class SemanticSegmentation(NormalizesImages, ClassificationModule):
    """Predicts a class for every pixel: cross-entropy and Dice, mean IoU, scores per class.

        loss = cross_entropy + dice_weight · dice      for each image; pixels of 255 do not count

    The module logs what `ClassificationModule` does, with pixels as samples, so that `val/accuracy`
    is the share of correct pixels. It also logs `val/miou`, the mean over the classes that occur or
    are predicted of

        IoU = |pixels of the class ∩ pixels predicted as it| / |their union|

    `train/plain_loss` is the cross-entropy of training without class weights. If the head returns
    several answers in training, the loss is the mean over them.

    Args:
        model: images [batch, in_channels, height, width] to logits [batch, num_classes, height,
            width], such as `Segmenter`; a module, or its configuration (see `TaskModule`).
        optimizer, scheduler, finetune: see `TaskModule`.
        num_classes: at least 2.
        class_names: names for tables and pictures; None: "0", "1", …
        image_size: size of the images that the model takes: side in pixels, or [height, width].
        interpolation: how pictures are resized to it.
        windows: False: whole pictures are resized to `image_size`, and in prediction their logits
            back to the size of the picture. True: a window of `image_size` slides over pictures.
            None: as in the data module in the trainer, otherwise False.
        overlap: share of a window's sides by which neighbouring windows overlap at least.
        in_channels, mean, std: see `NormalizesImages.expect_images`.
        class_weights: see `ClassificationModule`; they apply to the cross-entropy only. "balanced"
            gives a class without counted pixels the weight 1.
        dice_weight: weight of Dice in the loss; 0: cross-entropy only.
        region: the pixels whose logits are explained: a pixel [row, column], or a box [top, left,
            bottom, right] in pixels of the image that the model takes; None: the whole image.

    Raises:
        ValueError: an argument out of range.
        UserError: in `setup`, if the training data has other `windows`.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        scheduler: Callable[..., LRScheduler] | Mapping[str, Any] | None = None,
        finetune: Callable[[nn.Module], Any] | Mapping[str, Any] | None = None,
        *,
        num_classes: int,
        image_size: Size,
        mean: Sequence[float],
        std: Sequence[float],
        class_names: Sequence[str] | None = None,
        interpolation: str | None = None,
        windows: bool | None = None,
        overlap: float = 0.25,
        in_channels: int = 3,
        class_weights: ClassWeights | None = None,
        dice_weight: float = 1.0,
        region: Sequence[int] | None = None,
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
        self.expect_images(image_size, in_channels, mean, std, interpolation)
        at_least(0, dice_weight=dice_weight)
        if not 0 <= overlap < 1:
            raise ValueError(f"overlap: expected a share from 0 to below 1, got {overlap}")
        self.example_input_array = torch.zeros(1, in_channels, *sides(image_size))
        self.windows, self.overlap, self.dice_weight = windows, overlap, dice_weight
        self.region = _box(region, sides(image_size))
        self.predicted: list[Tensor] = []  # classes [height, width] of each image of a prediction

    def setup(self, stage: str) -> None:
        super().setup(stage)
        of_data = getattr(getattr(self.trainer, "datamodule", None), "windows", None)
        if self.windows is None and of_data is not None:
            self.windows = self.hparams["windows"] = of_data
        elif stage == "fit" and of_data is not None and of_data != self.windows:
            mine, given = (str(value).lower() for value in (self.windows, of_data))
            raise UserError(
                f"module.windows: got {mine}, but data.windows is {given}; give both alike, or "
                "data.windows alone\n  windows are cut out with data.crop_min_area=null"
            )

    def forward(self, images: Tensor) -> Logits:
        """Return the logits of every pixel; images are uint8 or float in [0, 1], of
        `image_size`."""
        return self.model(self.normalized(images))

    def segment(self, image: Annotated[Tensor, "channels height width"]) -> Logits:
        """Return logits [classes, height, width] of a picture of any size, by windows or
        resizing."""
        size = sides(self.image_size or image.shape[-2:])
        image = to_channels(image, 1) if self.in_channels < len(image) else image
        image = image.expand(self.in_channels, -1, -1)[None]
        if self.windows:
            return slide(self, image, size, self.overlap)[0]
        logits = self(resized(size, self.interpolation)(image))
        whole = image.shape[-2:]
        return functional.interpolate(logits, whole, mode="bilinear", align_corners=False)[0]

    def metrics(self) -> dict[str, Metric]:
        return {"miou": MulticlassJaccardIndex(self.num_classes, validate_args=False),
                **super().metrics()}  # fmt: skip

    def on_train_start(self) -> None:
        super().on_train_start()
        counts = self.class_counts() if self.is_balanced else None
        if counts is not None and self.class_weights is not None:
            # Only some pictures are counted: a class that is missing in them may be in others.
            self.class_weights[counts.to(self.device) == 0] = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        head: Any = getattr(self.model, "head", None)
        if hasattr(head, "anneal"):
            total = self.trainer.estimated_stepping_batches
            head.anneal(min(1.0, self.trainer.global_step / total))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, masks = batch
        masks = masks.long()
        logits = self(images)
        if logits.ndim == 4:
            logits = logits.unsqueeze(1)
        each = [self.losses(answer, masks) for answer in logits.float().unbind(dim=1)]
        losses = torch.stack(each).mean(dim=0)
        with torch.no_grad():
            plain = _over_pixels(logits[:, -1].float(), masks, None)
        self.log_train_loss(losses, plain)
        return losses.mean()

    def losses(self, logits: Logits, masks: Masks) -> Annotated[Tensor, "batch"]:
        """Return the loss of each image; training minimises their mean."""
        losses = _over_pixels(logits, masks, self.class_weights)
        return losses + self.dice_weight * dice_loss(logits, masks) if self.dice_weight else losses

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Any) -> None:
        images, masks = batch
        if isinstance(images, Tensor) and not self.windows:
            pairs = [(self(images), masks)]
        else:
            pairs = [(self.segment(i)[None], m[None]) for i, m in zip(images, masks, strict=True)]
        for logits, truth in pairs:
            counts = truth != IGNORED
            if counts.any():
                self.evaluate(stage, logits.movedim(1, -1)[counts], truth[counts].long())
                continue
            # Log anyway, because every process must take part in the reduction at the end.
            metrics: Any = self.val_metrics if stage == "val" else self.test_metrics
            for name, metric in metrics.items():
                self._log(f"{stage}/{name}", metric, prog_bar=name == "accuracy")

    def class_counts(self) -> Tensor | None:
        return getattr(getattr(self.trainer, "datamodule", None), "class_counts", None)

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        scores: Any = [RegionScore(s.name, iou_of(s.f1), *s[1:]) for s in self.class_scores]
        self.class_scores = scores

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, list[Any]]:
        """Predict the classes of pixels and keep them in the attribute `predicted`.

        Returns:
            lists with an entry per picture: `path`, and `share(<class>)`, the share of its pixels,
            for each class.
        """
        images, *rest = batch
        self.predicted = [self.segment(image).argmax(dim=0).byte().cpu() for image in images]
        counts = [p.flatten().bincount(minlength=self.num_classes) for p in self.predicted]
        shares = [(c / c.sum()).tolist() for c in counts]
        columns = {
            f"share({name})": [share[number] for share in shares]
            for number, name in enumerate(self.class_names)
        }
        return {"path": list(rest[0]), **columns} if rest and shares else columns

    def explained(self, batch: Any) -> Explained:
        """Return the inputs of `attnkit.explain` for a batch: the mean logits of `region`."""
        images, *rest = batch
        if not isinstance(images, Tensor):
            size = sides(self.image_size or images[0].shape[-2:])
            images = torch.stack([resized(size, self.interpolation)(image) for image in images])
            rest = [r for r in rest if not isinstance(r[0], Tensor)]
        pixels = self.as_floats(images)
        made = Explained(
            _Region(self.model, self.region), self.normalized(pixels), pictures=pixels,
            class_names=self.class_names,
        )  # fmt: skip
        top, left, bottom, right = self.region
        made.notes.append(
            f"explained: the mean logits of the pixels in rows {top} to {bottom - 1}, columns "
            f"{left} to {right - 1}; module.region=[row,column] or [top,left,bottom,right]"
        )
        if rest and isinstance(rest[0], Tensor):
            inside = rest[0][:, top:bottom, left:right].flatten(1).long()
            counts = functional.one_hot(inside, IGNORED + 1).sum(dim=1)[:, : self.num_classes]
            made.truth = torch.where(counts.sum(dim=1) > 0, counts.argmax(dim=1), -1)
        elif rest:
            made.names = list(rest[0])
        return made

    def programs(self) -> dict[str, "Program"]:
        """Return the program to export: images of one size to the logits of every pixel."""
        shape = self.num_classes, *sides(self.image_size or 0)
        return self.program("logits", shape, "of each class at every pixel; argmax decides")

    def facts(self) -> dict[str, Any]:
        how = {"windows": bool(self.windows), "overlap": self.overlap}
        return {"classes": self.class_names, "preprocessing": {**self.preprocessing(), **how}}


class RegionScore(NamedTuple):
    """Scores of one class over pixels; None if the denominator of a ratio is 0."""

    name: str
    iou: float | None
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


def iou_of(f1: float | None) -> float | None:
    """Return the intersection over union, F1 / (2 − F1)."""
    return None if f1 is None else f1 / (2 - f1)


def dice_loss(logits: Logits, masks: Masks) -> Annotated[Tensor, "batch"]:
    """Return the Dice loss of each image (Milletari et al., V-Net, 2016, without squares):

        1 − mean over classes c in the image of  2 Σ p_c y_c / (Σ p_c + Σ y_c)

    p is the softmax of the logits; y is 1 where a pixel is of the class, else 0. Sums are over the
    pixels that count; the loss of an image without such pixels is 0.

    Args:
        logits: logits of every pixel.
        masks: class numbers, 255 where a pixel does not count.
    """
    counts = (masks != IGNORED).unsqueeze(1)
    classes = torch.arange(logits.shape[1], device=masks.device)[:, None, None]
    truth = (masks.unsqueeze(1) == classes).to(logits.dtype)
    shares = logits.softmax(dim=1) * counts
    both, there = (shares * truth).sum(dim=(2, 3)), truth.sum(dim=(2, 3))
    dice = 2 * both / (shares.sum(dim=(2, 3)) + there).clamp_min(1e-6)
    is_there = there > 0
    return ((1 - dice) * is_there).sum(dim=1) / is_there.sum(dim=1).clamp_min(1)


def _over_pixels(logits: Logits, masks: Masks, weights: Tensor | None) -> Tensor:
    """Return the cross-entropy of each image, [batch], the mean over the pixels that count."""
    options: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "none"}
    losses = functional.cross_entropy(logits, masks, weights, **options).sum(dim=(1, 2))
    return losses / (masks != IGNORED).sum(dim=(1, 2)).clamp_min(1)


def _box(region: Sequence[int] | None, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of the explained region; raise ValueError if invalid."""
    whole = [0, 0, *size] if region is None else region
    given = list(whole) if isinstance(whole, Sequence) else [whole]
    if any(isinstance(place, bool) or not isinstance(place, int) for place in given):
        raise ValueError(f"region: expected whole numbers of pixels, got {region}")
    box = [*given, given[0] + 1, given[1] + 1] if len(given) == 2 else given
    if len(box) != 4 or not (0 <= box[0] < box[2] <= size[0] and 0 <= box[1] < box[3] <= size[1]):
        raise ValueError(
            f"region: expected a pixel [row, column] or a box [top, left, bottom, right] within "
            f"{size[0]} x {size[1]} pixels, got {region}"
        )
    return box[0], box[1], box[2], box[3]


class _Region(nn.Module):
    """Wraps a model; returns the mean logits of a box of each image, [batch, classes]."""

    def __init__(self, model: nn.Module, box: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.model, self.box = model, box

    def forward(self, images: Tensor) -> Tensor:
        top, left, bottom, right = self.box
        return self.model(images)[..., top:bottom, left:right].mean(dim=(-2, -1))
