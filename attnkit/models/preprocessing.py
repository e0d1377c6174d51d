"""The images that pretrained networks expect: their size, mean, standard deviation, …"""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data import resolve_data_config
from torch import Tensor

from attnkit.core.arguments import in_a_line, pair
from attnkit.models.weights import (
    HUB,
    check_name,
    is_name,
    of_vit,
    read_json,
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
_NOT_OF_TOWERS = ("architectures", "auto_map", "dtype", "id2label", "label2id",
                  "quantization_config", "torch_dtype")  # fmt: skip
VERSION = "transformers_version"
"""The key that marks a configuration read from a file, which may have keys unknown to its class."""
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


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
        try:
            return tower_facts(node["weights"])
        except ValueError as error:
            raise ValueError(f"weights: {error}") from error
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


def _facts(name: str | None, config: Any) -> dict[str, Any]:
    if not config:
        return {}
    found = resolve_data_config(pretrained_cfg=config)
    channels, height, width = found["input_size"]
    patch = re.search(r"patch(\d+)", name or "")
    return {
        "name": name,
        "patch_size": int(patch[1]) if patch else None,
        "image_size": _side([height, width]),
        "in_channels": channels,
        "mean": list(found["mean"]),
        "std": list(found["std"]),
        "interpolation": found["interpolation"],
        "crop_pct": found["crop_pct"],
    }


def _patch_size(state: Mapping[str, Tensor]) -> int | list[int] | None:
    """Return the side of a Vision Transformer's patches, or [height, width], by its first layer."""
    patches = state.get("patch_embed.proj.weight", state.get("patch_embed.weight"))
    return None if patches is None or patches.ndim != 4 else _side([*patches.shape[2:]])


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
    sides = [side * size for size in patches.shape[2:]]
    return {
        "patch_size": _patch_size(state),
        "image_size": _side(sides),
        "in_channels": patches.shape[1],
    }


def tower_facts(given: str | Path) -> dict[str, Any]:
    """Return what is known of a vision tower and its images, without importing transformers.

    Args:
        given: a folder that `save_pretrained` wrote, or `hf-hub:NAME`. In a model of images and
            texts, such as CLIP, the vision tower is meant.

    Returns:
        `config`, the settings of the tower as plain data; `image_size` and `in_channels`; and from
        `preprocessor_config.json` `mean` and `std` of pixels from 0 to 1, `interpolation` and
        `crop_pct`. A null counts as missing.

    Raises:
        ValueError: a missing folder, one without a model of transformers, or files with impossible
            values.
    """
    found = read_json(given, "config.json")
    if "model_type" not in found:
        what = "is of timm: model=timm takes it" if "architecture" in found else "names no model"
        raise ValueError(
            f"{given}: expected a folder that save_pretrained of transformers wrote, or "
            f"{HUB}NAME; its config.json {what if found else 'is missing'}"
        )
    prepared = read_json(given, "preprocessor_config.json")
    processor = {} if prepared else read_json(given, "processor_config.json")
    try:
        of_images = _part(found, "vision_config")
        named = {"model_type": f"{found['model_type']}_vision_model", **of_images}
        config = found if found.get("vision_config") is None else named
        config = {key: value for key, value in config.items() if key not in _NOT_OF_TOWERS}
        config[VERSION] = config.get(VERSION) or found.get(VERSION) or "unknown"
        channels = num_channels(config)
        facts = {"config": config, "in_channels": channels}
        images = prepared or _part(processor, "image_processor")
        crop = _side(images.get("crop_size")) if images.get("do_center_crop") else None
        whole = _side(images.get("size"))
        if size := crop or whole or _side(config.get("image_size")):
            pair("image_size", size)
            facts["image_size"] = size
        normalized = _normalized(images, channels)
        resample = images.get("resample")
        if not isinstance(resample, int | None):
            raise ValueError(f"resample: expected a number of PIL, got {in_a_line(resample)}")
    except ValueError as error:
        raise ValueError(f"{given}: its files say: {error}") from error
    if normalized:
        is_cut = isinstance(crop, int) and isinstance(whole, int) and crop < whole
        how = {
            "interpolation": _FILTERS.get(3 if resample is None else resample, "bicubic"),
            "crop_pct": crop / whole if is_cut else 1.0,
        }
        facts |= normalized | how
    else:
        _log.info(
            "%s has no mean and std: those of the data are used; set others by module.mean=…", given
        )
    return facts


def num_channels(config: Mapping[str, Any]) -> int:
    """Return the number of channels of a tower's images.

    Raises:
        ValueError: it is not a positive integer.
    """
    number = config.get("num_channels", 3)
    if type(number) is not int or number < 1:
        raise ValueError(f"num_channels: expected a positive integer, got {in_a_line(number)}")
    return number


def _part(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside of an object; empty if it is missing or null."""
    part = found.get(name)
    if not isinstance(part, Mapping | None):
        raise ValueError(f"{name}: expected an object, got {in_a_line(part)}")
    return part or {}


def _normalized(images: Mapping[str, Any], channels: int) -> dict[str, list[float]]:
    """Return mean and std of pixels from 0 to 1; empty if the files have none. Those in the files
    are of pixels from 0 to 255 times f = `rescale_factor`:
    (255 f x − m) / s = (x − m / 255 f) / (s / 255 f)."""
    values = {name: value for name, value in images.items() if value is not None}
    factor = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise ValueError(f"rescale_factor: expected a positive number, got {in_a_line(factor)}")
    scale = 1.0 if math.isclose(255 * factor, 1.0, rel_tol=1e-6) else 255 * factor
    if not values.get("do_normalize", True):
        values |= {"image_mean": [0.0] * channels, "image_std": [1.0] * channels}
    elif scale == 1.0 and not {"image_mean", "image_std"} & values.keys():
        return {}
    found: dict[str, list[float]] = {}
    for name in ("mean", "std"):
        numbers = values.get(f"image_{name}")
        given: list[Any] = numbers if isinstance(numbers, list) else [numbers]
        given = given * channels if len(given) == 1 else given
        least = -math.inf if name == "mean" else 0.0
        if len(given) != channels or not all(
            type(number) in (int, float) and least < number < math.inf for number in given
        ):
            what = "numbers" if name == "mean" else "positive numbers"
            got = "nothing" if numbers is None else in_a_line(numbers)
            raise ValueError(f"image_{name}: expected {channels} {what}, got {got}")
        found[name] = given if scale == 1.0 else [number / scale for number in given]
    return found


def _side(size: Any) -> Any:
    """Return a side, or [height, width]; None if the size is unknown."""
    if isinstance(size, Mapping):
        size = [size.get("height", size.get("shortest_edge")), size.get("width")]
        size = [size[0], size[1] or size[0]]
    if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
        return size[0]
    return size
