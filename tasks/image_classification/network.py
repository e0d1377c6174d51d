"""A convolutional network with attention in it."""

import inspect
from collections.abc import Callable

import torch
from torch import nn

from attnkit.surgery import insert_attention
from attnkit.tasks.images.sizes import Size, sides


def attention_network(
    backbone: Callable[..., nn.Module],
    attention: Callable[..., nn.Module] | None = None,
    *,
    where: str = "blocks",
    start_as_identity: bool = False,
    image_size: Size,
    in_channels: int,
    num_classes: int,
) -> nn.Module:
    """The backbone, with one attention module in each of its blocks or stages.

    Args:
        backbone: called with `in_channels` and `num_classes`, and with `image_size` if it takes
            that; images to logits.
        attention: called with the channels of a feature map; a module map → map. None: as it is.
        where: "blocks", "stages" or a pattern of module names: see `attnkit.insert_attention`.
        start_as_identity: whether the network first computes what it did without attention.
        image_size: side, or [height, width], in pixels of the images that channels are found with.
        in_channels: of the images.
        num_classes: how many logits.
    """
    takes_size = "image_size" in inspect.signature(backbone).parameters
    size = {"image_size": image_size} if takes_size else {}
    network = backbone(in_channels=in_channels, num_classes=num_classes, **size)
    if attention is not None:
        images = torch.zeros(1, in_channels, *sides(image_size))
        insert_attention(
            network, attention, where, start_as_identity=start_as_identity, example=images
        )
    return network
