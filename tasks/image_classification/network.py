"""Build a convolutional network with attention modules inserted."""

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
    """Return the backbone with one attention module in each of its blocks or stages.

    Args:
        backbone: constructor, called with `in_channels` and `num_classes`, and with `image_size` if
            it takes it; the network maps images to logits.
        attention: constructor, called with the number of channels of a feature map; the module maps
            it to one of the same shape. None: no attention is inserted.
        where: "blocks", "stages" or a pattern of module names: see `attnkit.insert_attention`.
        start_as_identity: whether the network at first computes the same as without attention.
        image_size: side, or [height, width], in pixels of an example image, which is used to find
            the number of channels.
        in_channels: number of channels of the images.
        num_classes: number of logits.
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
