"""The vision tower and images of a model of transformers, read from the files beside it."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from attnkit.core.arguments import in_a_line, pair
from attnkit.models.weights import HUB, asking_hub, existing, is_hub, reason

_log = logging.getLogger(__name__)
_NOT_OF_TOWERS = ("architectures", "auto_map", "dtype", "id2label", "label2id",
                  "quantization_config", "torch_dtype")  # fmt: skip
VERSION = "transformers_version"
"""The key that marks a configuration read from a file, which may have keys unknown to its class."""
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


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
    found = _read(given, "config.json")
    if "model_type" not in found:
        what = "is of timm: model=timm takes it" if "architecture" in found else "names no model"
        raise ValueError(
            f"{given}: expected a folder that save_pretrained of transformers wrote, or "
            f"{HUB}NAME; its config.json {what if found else 'is missing'}"
        )
    prepared = _read(given, "preprocessor_config.json")
    processor = {} if prepared else _read(given, "processor_config.json")
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


def _read(given: str | Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file beside the weights; empty if the file is missing."""
    try:
        if is_hub(given):
            repository, _, revision = str(given).removeprefix(HUB).partition("@")
            with asking_hub():
                path = Path(hf_hub_download(repository, name, revision=revision or None))
        elif not (path := existing(given) / name).is_file():
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"expected an object, got {in_a_line(found)}")
        return found
    except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{given}: its {name} cannot be read: {error}") from error
    except (OSError, HfHubHTTPError) as error:
        if isinstance(error, EntryNotFoundError) and name != "config.json":
            return {}
        raise ValueError(f"{given} cannot be loaded: {reason(error)}") from error
