"""What pretrained networks expect of images: their size, mean, standard deviation, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
from timm.data import resolve_data_config

from attnkit.models.weights import existing, is_hub, read_source

OF_DATA = ("image_size", "in_channels", "interpolation", "crop_pct")
"""What of it is for data, which prepare images; `mean` and `std` are for modules."""


def expected_images(node: Mapping[str, Any]) -> dict[str, Any]:
    """What the weights that a configuration of a network asks for were trained on.

    Of timm's own weights it is their `pretrained_cfg`; of a Hugging Face folder and of the hub what
    their config.json says, of other files what timm says of the network.

    Args:
        node: with `name` and `pretrained: true`, or `weights`; or with `pretrained: NAME`, a name,
            `hf-hub:NAME`, folder or file.

    Returns:
        `name` of the network, `image_size` (a side, or height and width), `in_channels`, `mean`,
        `std`, `interpolation` and `crop_pct`; nothing where the node asks for no weights, or
        nothing is known of them.

    Raises:
        ValueError: there are no such weights.
    """
    pretrained, weights, name = (node.get(key) for key in ("pretrained", "weights", "name"))
    if not pretrained and not isinstance(weights, str):
        return {}
    given = pretrained if isinstance(pretrained, str) else weights
    key = "weights" if given is weights else "pretrained"
    config: Any = {}
    if isinstance(given, str) and (key == "weights" or not timm.is_model(given)):
        try:
            source = read_source(given if is_hub(given) else existing(given))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        config, name = source.config, name or source.architecture
    elif isinstance(given, str):
        name = given
    if not config.get("mean"):
        known = timm.get_pretrained_cfg(name) if name and timm.is_model(name) else None
        config = known.to_dict() if known else {}
    if not config:
        return {}
    found = resolve_data_config(pretrained_cfg=config)
    channels, height, width = found["input_size"]
    return {
        "name": name,
        "image_size": height if height == width else [height, width],
        "in_channels": channels,
        "mean": list(found["mean"]),
        "std": list(found["std"]),
        "interpolation": found["interpolation"],
        "crop_pct": found["crop_pct"],
    }
