"""Distillation from a frozen teacher's logits and features, beside the labels."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2.functional import grayscale_to_rgb, rgb_to_grayscale

from attnkit.core.arguments import at_least, pair, positive, up_to_1
from attnkit.finetune.layers import head_of
from attnkit.lightning.callbacks.cached_features import KeptRows, why_samples_change
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.modules.classification import ClassificationModule

_log = logging.getLogger(__name__)


class Distillation(Callback):
    """Trains a classifier of images to match the outputs of a frozen teacher.

        loss = (1 − weight) · L(s, y) + weight · T² · KL(softmax(t / T) ‖ softmax(s / T))
               + features · Σ_j (G(S) − G(F))²_ij

    for each image i, with the module's own loss L, its logits s and the teacher's logits t. S and F
    are the inputs of the heads of student and teacher, which may have any width, and G(X) is X Xᵀ
    over a batch, with rows of length 1. `train/loss` is this loss; `train/distill_loss` is the KL
    divergence alone. Logits: Hinton et al. (2015). Features: Tung and Mori (2019), whose loss is
    the mean over j; the sum here makes its weight independent of the batch.

    The teacher sees the same images as the student, mixed and augmented ones included (Beyer et
    al., 2022), with its own normalization, size and colours. It is in evaluation mode, is not
    trained, and no checkpoint holds it. If no image changes between epochs, its outputs are
    computed once for each image, and a log line says so.

    Args:
        teacher: a checkpoint of a module of the student's class; a name of timm, whose pretrained
            weights are loaded; or a network that takes images in floats from 0 to 1.
            `distill.teacher=` also takes a run folder, for its best checkpoint.
        temperature: T.
        weight: weight of the KL divergence, 0 to 1.
        features: weight of the features' loss, at least 0.
        cache: whether the teacher's outputs may be computed once for each image.

    Raises:
        ValueError: a weight or temperature out of range.
        UserError: when training begins: the teacher cannot be loaded or has other classes, the
            module is not a classifier of images, or the images keep their own sizes.
    """

    def __init__(
        self,
        teacher: str | nn.Module,
        *,
        temperature: float = 4.0,
        weight: float = 0.5,
        features: float = 0.0,
        cache: bool = True,
    ) -> None:
        up_to_1(weight=weight)
        at_least(0, features=features)
        positive(temperature=temperature)
        if not weight and not features:
            raise ValueError("weight: expected weight or features above 0, got 0 for both")
        self.given, self.cache = teacher, cache
        self.temperature, self.weight, self.features = temperature, weight, features
        self._undo: list[Callable[[], None]] = []
        self._read: dict[str, Tensor] = {}
        """The newest inputs of the student, of its head and of the teacher's head."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not (isinstance(pl_module, ClassificationModule) and hasattr(pl_module, "as_pictures")):
            raise UserError(
                f"distill.teacher: {type(pl_module).__name__} is no classifier of images; "
                "the tasks vit, spatial and channel have one"
            )
        if getattr(getattr(trainer, "datamodule", None), "native", False):
            raise UserError(
                "distill.teacher: expected images of one size, got data.native=true; "
                "data.native=false resizes them"
            )
        with torch.random.fork_rng(devices=[]):  # initial weights are replaced anyway
            self._teacher, self._facts = _teacher(self.given, pl_module, self.weight > 0)
        self._teacher.requires_grad_(False).eval()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._teacher.to(pl_module.device)
        reason = why_samples_change(trainer, pl_module) if self.cache else "distill.cache=false"
        self._kept = None if reason else KeptRows()
        self._say(f"in every step: {reason}" if reason else "once for each image")
        self._module, self._own_losses = pl_module, pl_module.losses
        pl_module.losses = self._losses
        self._undo.append(lambda: delattr(pl_module, "losses"))
        self._watch("images", pl_module.model)
        if self.features:
            for name, network in (("student", pl_module.model), ("teacher", self._teacher)):
                self._watch(name, _head(network))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kept:
            self._kept.num_found = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kept and self._kept.ends_epoch_without_a_second_look():
            self._kept = None
            self._say("in every step: no image occurred twice")

    def on_fit_end(self, *args: Any) -> None:
        while self._undo:
            self._undo.pop()()
        self._read, self._kept = {}, None

    def on_exception(self, *args: Any) -> None:
        self.on_fit_end()

    def _say(self, what: str) -> None:
        rank_zero_only(_log.info)(f"distill: the teacher runs {what}")

    def _watch(self, name: str, module: nn.Module) -> None:
        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._read[name] = inputs[0]

        self._undo.append(module.register_forward_pre_hook(keep).remove)

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample, in place of the module's own."""
        images, count = self._read["images"], logits.shape[1]
        outputs = self._kept.of(images, self._ask) if self._kept else self._ask(images)
        assert outputs is not None
        losses = (1 - self.weight) * self._own_losses(logits, labels)
        if self.weight:
            apart = divergences(logits, outputs[:, :count], self.temperature)
            self._module.log("train/distill_loss", apart.detach().mean(), on_step=False,
                             on_epoch=True, batch_size=len(apart))  # fmt: skip
            losses = losses + self.weight * self.temperature**2 * apart
        if self.features:
            seen = outputs[:, count if self.weight else 0 :]
            losses = losses + self.features * distances(self._read["student"], seen)
        return losses

    @torch.no_grad()
    def _ask(self, images: Tensor) -> Tensor:
        """Return rows of the teacher's logits and of the input of its head, as far as needed."""
        facts = self._facts
        self._module.check_prepares()  # raises if the normalization is unknown
        pictures = self._module.as_pictures(images * self._module.std + self._module.mean)
        pictures = _fitted(pictures.float(), facts["in_channels"], facts["image_size"])
        mean, std = (pictures.new_tensor(facts[key]).view(-1, 1, 1) for key in ("mean", "std"))
        logits = self._teacher((pictures - mean) / std)
        rows = [logits] if self.weight else []
        rows += [self._read["teacher"].flatten(1)] if self.features else []
        return torch.cat([row.float() for row in rows], dim=1)


def divergences(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(softmax(teacher / T) ‖ softmax(logits / T)) of each row [samples, classes]."""
    student, teacher = (
        (each.float() / temperature).log_softmax(dim=1) for each in (logits, teacher)
    )
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)


def distances(student: Tensor, teacher: Tensor) -> Tensor:
    """Return Σ_j (G(student) − G(teacher))²_ij for each sample i of features [samples, …]."""

    def similarities(features: Tensor) -> Tensor:
        rows = features.float().flatten(1)
        return functional.normalize(rows @ rows.T, dim=1)

    return (similarities(student) - similarities(teacher)).square().sum(dim=1)


def _head(network: nn.Module) -> nn.Module:
    if not (names := head_of(network)):
        raise UserError(
            f"distill.features: expected networks with a last layer called head, fc or classifier, "
            f"got {type(network).__name__}"
        )
    return network.get_submodule(names[-1])


def _teacher(given: Any, module: Any, by_logits: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network of a teacher, and its in_channels, image_size, mean and std."""
    if isinstance(given, nn.Module):
        channels = module.in_channels
        plain = {"mean": [0.0] * channels, "std": [1.0] * channels}
        return given, {"in_channels": channels, "image_size": None, **plain}
    try:
        if Path(given).is_file():
            teacher = type(module).load_from_checkpoint(given, map_location="cpu")
            teacher.check_prepares()
            if by_logits:
                _check_classes(given, module.class_names, teacher.class_names)
            return teacher.model, teacher.preprocessing()
        from attnkit.models.backbones import timm_backbone
        from attnkit.models.preprocessing import expected_images
        from attnkit.models.weights import check_name

        count = check_name(given).get("num_classes", 0)
        if by_logits:
            _check_classes(given, module.num_classes, count)
        node = {"_target_": "attnkit.models.timm_backbone", "name": given, "pretrained": True}
        facts = expected_images(node)
        return timm_backbone(given, facts["in_channels"], count, pretrained=True), facts
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        message = str(error) if "\n" in str(error) else first_line(error)
        where = "" if str(given) in message else f"{given}: "
        if message.startswith("name: expected"):
            message = "expected a run folder, a checkpoint or" + message.removeprefix(
                "name: expected"
            )
        raise UserError(f"distill.teacher: {where}{message}") from error


def _check_classes(given: Any, ours: list[str] | int, theirs: list[str] | int) -> None:
    if ours != theirs:
        here, there = (
            each if isinstance(each, int) else f"{len(each)} ({', '.join(each[:3])}, …)"
            for each in (ours, theirs)
        )
        raise ValueError(
            f"expected the {here} classes of the data, got the {there} of {given}\n"
            "  distill.weight=0 distill.features=1 learns from its features alone"
        )


def _fitted(pictures: Tensor, in_channels: int, size: Any) -> Tensor:
    """Return pictures in grey or colours, as the teacher takes them, and at its size, if any."""
    if pictures.shape[1] != in_channels:
        change = rgb_to_grayscale if in_channels == 1 else grayscale_to_rgb
        pictures = change(pictures)
    size = pictures.shape[2:] if size is None else pair("image_size", size)
    if tuple(size) == tuple(pictures.shape[2:]):
        return pictures
    return functional.interpolate(pictures, size, mode="bicubic", antialias=True)
