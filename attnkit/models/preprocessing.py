"""The images that pretrained networks expect: their size, mean, standard deviation, …"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from timm.data import resolve_data_config
from torch import Tensor

from attnkit.models.weights import (
    check_name,
    is_name,
    of_vit,
    read_source,
    read_weights,
    timm_config,
)

_log = logging.getLogger(__name__)

OF_DATA = ("image_size", "in_channels", "interpolation", "crop_pct")
"""The expected facts that are for data, which prepare images; `mean` and `std` are for modules."""
OF_MODEL = ("name", "patch_size", "config")
"""The expected facts that are for the network itself."""
_TARGETS = (
    "attnkit.TimmEncoder",
    "attnkit.interop.PretrainedViT",
    "attnkit.interop.timm_network",
    "attnkit.models.timm_backbone",
    "timm.create_model",
)


def expected_images(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing with which the weights in a network's configuration were trained.

    For timm's own weights it is their `pretrained_cfg`; for a Hugging Face folder and the hub it is
    in config.json; for other files it is what timm knows of the network, or else the size alone,
    which the logger `attnkit.models.preprocessing` reports.

    Args:
        node: configuration of `timm_backbone`, `timm_network`, `TimmEncoder` or
            `timm.create_model`, with `pretrained: true` or `weights`, of `PretrainedViT`, with
            `pretrained: NAME`, or of `VisionTower` with `weights`. Nothing is known of others.

    Returns:
        `name` and `patch_size` of the network, or `config` of a tower of transformers;
        `image_size` (a side, or height and width), `in_channels`, `mean`, `std`, `interpolation`
        and `crop_pct`, as far as they are known. Empty if the node requests no weights.

    Raises:
        ValueError: an unknown name, or missing weights. The files are read now, so that the error
            comes before thousands of images are read.
    """
    if node.get("_target_") == "attnkit.interop.VisionTower" and node.get("weights"):
        return _of_transformers(node["weights"])
    if node.get("_target_") not in _TARGETS:
        return {}
    named = node.get("name", node.get("model_name"))
    if named is not None:
        check_name(named)
    pretrained, weights = node.get("pretrained"), node.get("weights")
    if not pretrained and not isinstance(weights, str):
        return {}
    key = "weights" if isinstance(weights, str) else "pretrained"
    given = node[key]
    try:
        if given is True or is_name(given):
            name = named if given is True else given
            return _facts(name, timm_config(name))
        source, state = read_source(given), read_weights(given)
        name = named or source.architecture
        found = _facts(name, source.config if source.config.get("mean") else timm_config(name))
        if found and found["patch_size"] is None:  # not every name contains it
            found["patch_size"] = _patch_size(of_vit(state))
        return found or _of_vit(given, of_vit(state))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _of_transformers(weights: str) -> dict[str, Any]:
    from attnkit.models.tower_files import tower_facts

    try:
        return tower_facts(weights)
    except ValueError as error:
        raise ValueError(f"weights: {error}") from error


def _facts(name: str | None, config: Any) -> dict[str, Any]:
    if not config:
        return {}
    found = resolve_data_config(pretrained_cfg=config)
    channels, height, width = found["input_size"]
    patch = re.search(r"patch(\d+)", name or "")
    return {
        "name": name,
        "patch_size": int(patch[1]) if patch else None,
        "image_size": height if height == width else [height, width],
        "in_channels": channels,
        "mean": list(found["mean"]),
        "std": list(found["std"]),
        "interpolation": found["interpolation"],
        "crop_pct": found["crop_pct"],
    }


def _patch_size(state: Mapping[str, Tensor]) -> int | list[int] | None:
    """Return the side of a Vision Transformer's patches, or [height, width], by its first layer."""
    patches = state.get("patch_embed.proj.weight", state.get("patch_embed.weight"))
    if patches is None or patches.ndim != 4:
        return None
    height, width = patches.shape[2:]
    return height if height == width else [height, width]


def _of_vit(given: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the parameters of a Vision Transformer tell, with timm's names or ours."""
    patches = state.get("patch_embed.proj.weight", state.get("patch_embed.weight"))
    positions = state.get("pos_embed", state.get("position_table"))
    if patches is None or positions is None or patches.ndim != 4 or positions.ndim != 3:
        return {}
    _log.info(
        "%s has no mean and std: those of the data are used; set others by module.mean=…", given
    )
    side = math.isqrt(positions.shape[1])  # the grid's side, which few prefix tokens do not change
    height, width = patches.shape[2:]
    return {
        "patch_size": height if height == width else [height, width],
        "image_size": side * height if height == width else [side * height, side * width],
        "in_channels": patches.shape[1],
    }
