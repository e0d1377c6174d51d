"""What the files beside a model of transformers say of its vision tower and of its images."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from attnkit.models.weights import HUB, asking_hub, existing, is_hub, reason

_log = logging.getLogger(__name__)
_NOT_OF_TOWERS = ("architectures", "auto_map", "dtype", "id2label", "label2id",
                  "quantization_config", "torch_dtype", "transformers_version")  # fmt: skip
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


def tower_facts(given: str | Path) -> dict[str, Any]:
    """What is known of a vision tower and its images, without importing transformers.

    Args:
        given: a folder that `save_pretrained` wrote, or `hf-hub:NAME`. Of a model of images and
            texts, such as CLIP, it is the vision tower.

    Returns:
        `config`, the settings of the tower as plain data; `image_size` and `in_channels`; and what
        `preprocessor_config.json` says: `mean`, `std`, `interpolation` and `crop_pct`.

    Raises:
        ValueError: there is no such folder, or no model of transformers in it.
    """
    found = _read(given, "config.json")
    if "model_type" not in found:
        what = "is of timm: model=timm takes it" if "architecture" in found else "names no model"
        raise ValueError(
            f"{given}: expected a folder that save_pretrained of transformers wrote, or "
            f"{HUB}NAME; its config.json {what if found else 'is missing'}"
        )
    config = {"model_type": f"{found['model_type']}_vision_model", **found.get("vision_config", {})}
    config = config if "vision_config" in found else found
    config = {key: value for key, value in config.items() if key not in _NOT_OF_TOWERS}
    images = _read(given, "preprocessor_config.json")
    images = images or _read(given, "processor_config.json").get("image_processor", {})
    facts = {"config": config, "in_channels": config.get("num_channels", 3)}
    crop = _side(images.get("crop_size")) if images.get("do_center_crop") else None
    whole = _side(images.get("size"))
    if size := crop or whole or _side(config.get("image_size")):
        facts["image_size"] = size
    if "image_mean" in images:
        facts["mean"], facts["std"] = images["image_mean"], images["image_std"]
        facts["interpolation"] = _FILTERS.get(images.get("resample", 3), "bicubic")
        is_cut = isinstance(crop, int) and isinstance(whole, int) and crop < whole
        facts["crop_pct"] = crop / whole if is_cut else 1.0
    else:
        _log.info(
            "%s has no mean and std: those of the data are used; set others by module.mean=…", given
        )
    return facts


def _side(size: Any) -> Any:
    """A side, or [height, width]; None: it is not said."""
    if isinstance(size, Mapping):
        size = [size.get("height", size.get("shortest_edge")), size.get("width")]
        size = [size[0], size[1] or size[0]]
    if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
        return size[0]
    return size


def _read(given: str | Path, name: str) -> dict[str, Any]:
    """A JSON file beside the weights, or nothing where there is none."""
    try:
        if is_hub(given):
            repository, _, revision = str(given).removeprefix(HUB).partition("@")
            with asking_hub():
                path = Path(hf_hub_download(repository, name, revision=revision or None))
        elif not (path := existing(given) / name).is_file():
            return {}
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{given}: its {name} cannot be read: {error}") from error
    except (OSError, HfHubHTTPError) as error:
        if isinstance(error, EntryNotFoundError) and name != "config.json":
            return {}
        raise ValueError(f"{given} cannot be loaded: {reason(error)}") from error
