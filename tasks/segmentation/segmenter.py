"""Segmentation network: a Vision Transformer and a head that reads its tokens."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.interop import from_timm
from attnkit.models.vit import Images, ViT
from attnkit.tasks.images.sizes import Size, sides


class Segmenter(nn.Module):
    """Segmentation network that computes the logits of every pixel: `head(features(images))`.

    The features are the tokens after the blocks of the backbone that the head chooses. The
    classifier of the backbone is left out, and a Vision Transformer of timm is converted to
    attnkit's, with equal outputs. Fine-tuning treats everything named `head` as the head.

    Args:
        backbone: constructor of a `ViT` or a network of timm, called with `image_size`,
            `in_channels` and `num_classes=0`, and if it is a `ViT` with `patch_size`.
        decoder: constructor of the head, such as `LinearHead`, called with the backbone and
            `num_classes`.
        image_size: side in pixels, or [height, width].
        in_channels: number of channels of the images.
        num_classes: number of logits of a pixel.
        patch_size: patch side of a `ViT`; None: its default. A network of timm has its own.

    Raises:
        ValueError: the backbone is not a Vision Transformer.
    """

    def __init__(
        self,
        backbone: Callable[..., nn.Module],
        decoder: Callable[..., nn.Module],
        *,
        image_size: Size,
        in_channels: int,
        num_classes: int,
        patch_size: int | None = None,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {"image_size": sides(image_size), "in_channels": in_channels}
        kind = getattr(backbone, "func", backbone)
        if patch_size is not None and isinstance(kind, type) and issubclass(kind, ViT):
            given["patch_size"] = patch_size
        network = backbone(**given, num_classes=0)
        try:
            found: Any = network if isinstance(network, ViT) else from_timm(network)
        except TypeError as error:
            raise ValueError(
                "backbone: expected a Vision Transformer, such as timm's vit_small_patch16_224 "
                f"(backbone.name), got {type(network).__name__}"
            ) from error
        except ValueError as error:
            raise ValueError(f"backbone: {error}") from error
        found.native = False  # the head takes one image size
        self.backbone: Any = found
        self.head: Any = decoder(found, num_classes=num_classes)

    def forward(self, images: Images) -> Annotated[Tensor, "batch classes height width"]:
        """Return the logits of every pixel. If the head has several answers in training, the result
        has one more dimension after the batch."""
        return self.head(self.features(images))

    def features(self, images: Images) -> Annotated[Tensor, "batch layers tokens dim"]:
        """Return the tokens that the head reads."""
        return torch.stack(self.backbone.layers(images, self.head.layers), dim=1)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()} | {"head.queries"}
