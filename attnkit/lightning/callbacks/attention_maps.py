"""Pictures of where a model looks, while it trains."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from matplotlib import colormaps
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.kernels.record import unrecorded
from attnkit.core.watch.capture import capture_attention
from attnkit.lightning.arguments import at_least
from attnkit.lightning.files import in_log_folder, replacing

MAX_PREFIX_TOKENS = 16  # class and register tokens tried for a model that does not say


def first_of_batch(batch: Any) -> Tensor:
    """The images of a batch (images, …)."""
    return batch[0]


class AttentionMaps(Callback):
    """Draws attention over the image for a few images of the first validation and test batch.

    Shown is the mean over heads of the weights of the class token, or of the mean over all tokens
    where there is none, in one layer. Each picture goes to the run's folder as PNG and to every
    logger that takes images (TensorBoard, Weights & Biases). The model runs a few images once more
    for it; the weights are computed beside the kernel that it uses, and only on rank zero.

    The module's `forward` takes images, [batch, channels, height, width], and holds attention of
    attnkit: a Transformer's tokens or a feature map's positions, in reading order, possibly after
    class and register tokens.

    Args:
        num_images: how many images are shown.
        every_n_epochs: draw in the validation of every n-th epoch.
        layer: which attention layer, by position or by name.
        rollout: multiply the layers up to the last, with their residual connections (Abnar and
            Zuidema, Quantifying Attention Flow in Transformers, 2020), rather than show one.
        num_prefix_tokens: class and register tokens before the first patch. None: what the model's
            attribute `num_prefix_tokens` says, else the fewest that leave a grid of the image's
            proportions.
        images: how to find the images in a batch; the first element by default.
        folder: for the PNG files; None for `attention_maps` in the trainer's log folder.

    Raises:
        ValueError: before training, if the model has no attention of attnkit, or its tokens are no
            grid over the image.
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

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = in_log_folder(trainer, self._given_folder, "attention_maps")

    def _draw(
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
        testing, epoch = stage == "test", trainer.current_epoch
        due = testing or trainer.sanity_checking or epoch % self.every_n_epochs == 0
        if not (due and batch_idx == dataloader_idx == 0 and trainer.is_global_zero):
            return
        images = self.images(batch)[: self.num_images]
        with trainer.precision_plugin.forward_context(), unrecorded():
            maps = [self.attention_map(pl_module, image) for image in images]
        if trainer.sanity_checking:  # only to learn before training that it works
            return
        pixels = draw_attention(images.float().cpu(), maps)
        name = "test" if testing else f"epoch={epoch:03d}"
        assert self.folder is not None
        with replacing(self.folder / f"{name}.png") as file:
            Image.fromarray(pixels.numpy()).save(file, "PNG")
        _send_image(trainer, f"{stage}/attention", pixels)

    on_validation_batch_end: Any = partialmethod(_draw, stage="val")
    on_test_batch_end: Any = partialmethod(_draw, stage="test")

    @torch.no_grad()
    def attention_map(self, model: nn.Module, image: Tensor) -> Tensor:
        """Attention [rows, columns] over one image [channels, height, width]; its sum is at most 1.

        The model runs as it stands: call `eval()` before to be rid of dropout.
        """
        told, has_class_token = self._prefix_of(model)
        rows = 0 if told and has_class_token and not self.rollout else None
        layers = None if self.rollout else self.layer
        with capture_attention(model, layers=layers, rows=rows) as captured:
            model(image[None])
        layers_weights = [weights[-1][0].float().mean(0) for weights in captured.values()]
        if not layers_weights:
            raise ValueError(f"layer: {self.layer!r} did not run")
        # An attention pooling leaves the prefix out.
        tried = [told, 0] if told is not None else range(MAX_PREFIX_TOKENS + 1)
        height, width = image.shape[-2:]
        prefix, grid = find_grid(layers_weights[-1].shape[-1], height, width, tried)
        weights = _rollout(layers_weights, prefix) if self.rollout else layers_weights[-1]
        tokens = weights[0] if prefix and has_class_token else weights.mean(0)
        return tokens[prefix:].reshape(grid).cpu()

    def _prefix_of(self, model: nn.Module) -> tuple[int | None, bool]:
        """Prefix tokens, None if unknown, and whether the first of them is a class token."""
        for module in model.modules():
            told = getattr(module, "num_prefix_tokens", None)
            if isinstance(told, int):
                class_token = getattr(module, "class_token", getattr(module, "cls_token", True))
                number = told if self.num_prefix_tokens is None else self.num_prefix_tokens
                return number, class_token is not None
        return self.num_prefix_tokens, True


def find_grid(
    num_tokens: int, height: int, width: int, num_prefix_tokens: Sequence[int]
) -> tuple[int, tuple[int, int]]:
    """The first of some numbers of prefix tokens that leaves a grid of the image's proportions.

    Returns:
        That number, and the rows and columns of the grid.
    """
    for prefix in num_prefix_tokens:
        rows = round(math.sqrt(max(num_tokens - prefix, 0) * height / width))
        if rows and rows * round(rows * width / height) == num_tokens - prefix:
            return prefix, (rows, (num_tokens - prefix) // rows)
    raise ValueError(
        f"num_prefix_tokens: {num_tokens} tokens do not form a grid over an image of "
        f"{height} x {width} after {' or '.join(map(str, num_prefix_tokens))} prefix tokens"
    )


def _rollout(layers: list[Tensor], num_prefix_tokens: int) -> Tensor:
    """Product over layers of (weights + identity) / 2, [rows of the last layer, tokens]."""
    num_tokens = layers[-1].shape[-1]
    flow = torch.eye(num_tokens, device=layers[-1].device)
    for weights in layers:
        if weights.shape[-1] != num_tokens:
            raise ValueError(
                f"rollout: the layers have different tokens, {weights.shape[-1]} and {num_tokens}"
            )
        if len(weights) == num_tokens or num_prefix_tokens:
            # A last layer computed for the class token only has that one row.
            identity = torch.eye(num_tokens, device=weights.device)[: len(weights)]
            weights = (weights + identity) / 2
        flow = weights @ flow
    return flow


def draw_attention(images: Tensor, maps: list[Tensor], height: int = 192, gap: int = 6) -> Tensor:
    """Each image above its attention map, which is upsampled and laid over the image in grey.

    Args:
        images: [batch, channels, height, width], of any range; not 3 channels: their mean is shown.
        maps: one [rows, columns] for each image; the brightest colour is the map's largest weight.
        height: of each image in the picture, in pixels.
        gap: white pixels between images.

    Returns:
        uint8 [height, width, 3].
    """
    size = (height, max(1, round(height * images.shape[-1] / images.shape[-2])))
    columns = []
    for image, weights in zip(images, maps, strict=True):
        picture = F.interpolate(_as_picture(image)[None], size)[0]
        heat = F.interpolate(weights[None, None], size, mode="bicubic")[0, 0].clamp(min=0)
        colours = np.asarray(colormaps["inferno"]((heat / heat.max().clamp(min=1e-12)).numpy()))
        coloured = torch.from_numpy(colours[..., :3]).movedim(-1, 0).float()
        panels = (picture, 0.4 * picture.mean(0) + 0.6 * coloured)
        framed = [F.pad(panel, (gap, 0, gap, 0), value=1.0) for panel in panels]
        columns.append(torch.cat(framed, dim=1))
    pixels = torch.cat(columns, dim=2)[:, gap:, gap:]
    return (255 * pixels).round().to(torch.uint8).permute(1, 2, 0)


def _as_picture(image: Tensor) -> Tensor:
    """An image of any range as [3, height, width] in [0, 1]."""
    image = image if image.shape[0] == 3 else image.mean(0, keepdim=True).expand(3, -1, -1)
    if image.min() >= 0 and image.max() <= 1:
        return image
    return (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)


def _send_image(trainer: Trainer, name: str, pixels: Tensor) -> None:
    for logger in trainer.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, images=[pixels.numpy()], step=trainer.global_step)
            continue
        writer = getattr(logger, "experiment", None)
        if writer is not None and hasattr(writer, "add_image"):
            writer.add_image(name, pixels.numpy(), trainer.global_step, dataformats="HWC")
