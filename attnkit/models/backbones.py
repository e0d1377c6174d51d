"""timm's networks under the argument names of this toolkit."""

from __future__ import annotations

import logging

import timm
from torch import nn


def timm_backbone(
    name: str, in_channels: int, num_classes: int, *, pretrained: bool = False
) -> nn.Module:
    """`timm.create_model`, of a name in its registry.

    Args:
        name: as `timm.list_models()` has it: "resnet18", "convnext_tiny", …
        in_channels: of the images; pretrained first layers are adapted, as timm does.
        num_classes: how many logits; pretrained heads are replaced.
        pretrained: with weights, which timm downloads or finds in its cache.

    Raises:
        ValueError: no such name, or the weights cannot be had.
    """
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('.')[0][:6]}*")[:5]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"name: expected a name of timm's registry, got {name!r}{hint}")
    log = logging.getLogger("huggingface_hub")
    level = log.level
    # its retries without a network are many lines, and the error below says it in one
    log.setLevel(logging.ERROR)
    try:
        return timm.create_model(
            name, pretrained=pretrained, in_chans=in_channels, num_classes=num_classes
        )
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"pretrained: the weights of {name} cannot be had: {reason}") from error
    finally:
        log.setLevel(level)
