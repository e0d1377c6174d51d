"""Pictures of where a model looks, while it trains, in tests and in predictions."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from attnkit.core.kernels.record import unrecorded
from attnkit.interpret.layer_maps import (
    LayerMap,
    chosen_layers,
    draw_layers,
    layer_maps,
    rollout_map,
)
from attnkit.interpret.training.show import show
from attnkit.lightning.arguments import at_least
from attnkit.lightning.errors import UserError, first_line
from attnkit.lightning.files import in_log_folder


def first_of_batch(batch: Any) -> Tensor:
    """The images of a batch (images, …)."""
    return batch[0]


class AttentionMaps(Callback):
    """Draws attention, or gates where there is none, over a few images, one of each class.

    A picture has the images of a validation, a test or a prediction, with their classes and
    predictions, and below the maps of a layer with its name and scale. Attention is the
    mean over heads, of the class token, or over all tokens where there is none, as a multiple of
    uniform attention; over channels it is a matrix. Gates are drawn between 0 and 1: over the
    image, or a curve over the channels. Each picture goes to the run's folder as PNG and to every
    logger that takes images (TensorBoard, Weights & Biases). The model runs the images once more
    for it; the weights are computed beside the kernel that it uses, and only on rank zero.

    The module's `forward` takes images, [batch, channels, height, width], and holds attention or
    gates of attnkit: a Transformer's tokens or a feature map's positions, in reading order,
    possibly after class and register tokens. Where it returns logits, they are the prediction.
    Classes are the integers behind the images in a batch, and named by its `class_names`.

    Args:
        num_images: how many images are shown at most.
        every_n_epochs: draw in the validation of every n-th epoch.
        layer: which layer, by position or by name (`*` matches anything, and each is a row).
        rollout: show `attnkit.explain`'s rollout through the layers rather than one of them.
        num_prefix_tokens: class and register tokens before the first patch. None: what the model's
            attribute `num_prefix_tokens` says, else the fewest that leave a grid of the image's
            proportions.
        images: how to find the images in a batch; the first element by default.
        folder: for the PNG files; None for `attention_maps` in the trainer's log folder.

    Raises:
        UserError: before it begins, if the model has neither attention nor gates of attnkit; in the
            check of the first validation, if tokens are not a grid over the image.
    """

    def __init__(
        self,
        num_images: int = 6,
        every_n_epochs: int = 1,
        layer: int | str = -1,
        rollout: bool = False,
        num_prefix_tokens: int | None = None,
        images: Callable[[Any], Tensor] = first_of_batch,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        at_least(1, num_images=num_images, every_n_epochs=every_n_epochs)
        self.num_images = num_images
        self.every_n_epochs = every_n_epochs
        self.layer = layer
        self.rollout = rollout
        self.num_prefix_tokens = num_prefix_tokens
        self.images = images
        self._given_folder = folder
        self.folder: Path | None = None
        self._kept: dict[Any, tuple[Tensor, str]] | None = None
        """By class, an image and its title; None when they are drawn."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = in_log_folder(trainer, self._given_folder, "attention_maps")
        chosen_layers(pl_module, self.layer)

    def _look(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
        *,
        stage: str,
    ) -> None:
        epoch = trainer.current_epoch
        due = stage != "val" or trainer.sanity_checking or epoch % self.every_n_epochs == 0
        if not due or dataloader_idx or not trainer.is_global_zero:
            return
        if batch_idx == 0:
            self._kept = {}
        if self._kept is None:
            return
        known = self._keep(batch, outputs, getattr(pl_module, "class_names", None))
        counts = getattr(trainer, f"num_{stage}_batches")
        last = trainer.sanity_checking or batch_idx + 1 >= counts[dataloader_idx]
        if not self._kept or (known and len(self._kept) < self.num_images and not last):
            return
        kept, self._kept = [*self._kept.values()], None
        images = torch.stack([image for image, _ in kept])
        with trainer.precision_plugin.forward_context(), unrecorded():
            found = [self._maps(pl_module, image.to(pl_module.device)) for image in images]
        if trainer.sanity_checking:  # only to learn before training that it works
            return
        says = [_prediction(output, pl_module) for _, output in found]
        titles = ["\n".join(filter(None, (title, said)))
                  for (_, title), said in zip(kept, says, strict=True)]  # fmt: skip
        figure = draw_layers(images, [maps for maps, _ in found], titles)
        assert self.folder is not None
        name = f"epoch_{epoch + 1:03d}" if stage == "val" else stage
        show(trainer, f"{stage}/attention", figure, self.folder / f"{name}.png")

    on_validation_batch_end: Any = partialmethod(_look, stage="val")
    on_test_batch_end: Any = partialmethod(_look, stage="test")
    on_predict_batch_end: Any = partialmethod(_look, stage="predict")

    def _keep(self, batch: Any, outputs: Any, names: Sequence[str] | None) -> bool:
        """Keep an image of each class that is new; whether classes are known."""
        images = self.images(batch)
        rows = outputs if isinstance(outputs, Mapping) else {}
        labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
        classes: Sequence[Any] | None = rows.get("truth")
        if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
            classes = [names[n] if names else n for n in labels.tolist()]
        shown = classes or rows.get("label") or range(len(images))
        assert self._kept is not None
        for place, (image, key) in enumerate(zip(images, shown, strict=True)):
            if len(self._kept) < self.num_images and key not in self._kept:
                lines = ["/".join(Path(rows["path"][place]).parts[-2:])] if "path" in rows else []
                lines += [f"true: {classes[place]}"] if classes and classes[place] != "" else []
                self._kept[key] = image.detach().cpu(), "\n".join(lines)
        return shown is not None and not isinstance(shown, range)

    @torch.no_grad()
    def _maps(self, model: nn.Module, image: Tensor) -> tuple[list[LayerMap], Any]:
        try:
            if self.rollout:
                return [rollout_map(model, image, self.num_prefix_tokens)], model(image[None])
            return layer_maps(model, image, self.layer, self.num_prefix_tokens)
        except (ValueError, TypeError) as error:
            raise UserError(f"AttentionMaps: {first_line(error)}") from error


def _prediction(output: Any, module: nn.Module) -> str:
    """The class that the logits of one image predict."""
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        return ""
    names = getattr(module, "class_names", None)
    probability, number = output[0].float().softmax(0).max(0)
    name = names[int(number)] if names else int(number)
    return f"predicted: {name} ({100 * float(probability):.0f} %)"
