"""A network of segmentation: a Vision Transformer and a head that reads its tokens."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnkit.interop import from_timm
from attnkit.models.vit import Images, ViT
from attnkit.tasks.images.sizes import Size, sides


class Segmenter(nn.Module):
    """Logits of every pixel: `head(features(images))`.

    The features are the tokens after some blocks of the backbone, which the head chooses. The
    backbone's own classifier is left out, and a Vision Transformer of timm becomes attnkit's, with
    equal outputs. All that is called `head` counts as the head in fine-tuning.

    Args:
        backbone: called with `image_size`, `in_channels` and `num_classes=0`, and if it is a `ViT`
            with `patch_size`: gives a `ViT` or a network of timm.
        decoder: called with the backbone and with `num_classes`: gives the head, as `LinearHead`.
        image_size: side in pixels, or [height, width].
        in_channels: of the images.
        num_classes: how many logits a pixel has.
        patch_size: of a `ViT`; None: its own, as that of a network of timm always is.

    Raises:
        ValueError: a backbone whose features are no tokens of a Vision Transformer.
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
        found.native = False  # the head is of one size
        self.backbone: Any = found
        self.head: Any = decoder(found, num_classes=num_classes)

    def forward(self, images: Images) -> Annotated[Tensor, "batch classes height width"]:
        """Logits of every pixel; of a head with several answers in training, those of each, with
        one more dimension behind the batch."""
        return self.head(self.features(images))

    def features(self, images: Images) -> Annotated[Tensor, "batch layers tokens dim"]:
        """The tokens that the head reads."""
        return torch.stack(self.backbone.layers(images, self.head.layers), dim=1)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters an optimizer should not shrink."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()} | {"head.queries"}
