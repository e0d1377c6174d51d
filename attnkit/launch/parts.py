"""Configurations of a module's parts, and a check of them before the data is read."""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from attnkit.launch.config import schema
from attnkit.lightning.build import build
from attnkit.lightning.errors import UserError
from attnkit.lightning.modules.module import TaskModule, untrained

_FULL = {"_target_", "_partial_"}  # the only keys of finetune=full
# Two sets of fake facts of the data. An error that occurs with both does not depend on the data.
_STAND_INS: tuple[dict[str, Any], ...] = (
    {"num_classes": 2, "in_channels": 3, "vocabulary_size": 11, "max_words": 7},
    {"num_classes": 5, "in_channels": 1, "vocabulary_size": 13, "max_words": 17},
)
_IMAGES = ({"image_size": 64, "patch_size": 8}, {"image_size": 224, "patch_size": 16})
# Models that name these sizes in their errors; for other models the image size is not guessed.
_VITS = ("attnkit.ViT", "attnkit.interop.PretrainedViT")


def module_parts(config: Mapping[str, Any], *, is_trained: bool = False) -> dict[str, Any]:
    """Return the configurations of model, optimizer, … for a module's constructor.

    Args:
        config: the configuration of the run.
        is_trained: whether a checkpoint is loaded next, so that no pretrained weights are read.
    """
    parts = {key: config[key] for key in schema.PARTS if config.get(key)}
    if not {k for k, v in parts.get("finetune", {}).items() if v is not None} - _FULL:
        parts.pop("finetune", None)  # everything is trained, as without a finetune node
    if "model" in parts:
        inner = {key: config[key] for key in schema.MODEL_PARTS if config.get(key)}
        parts["model"] = {**parts["model"], **inner}
        if is_trained:
            parts["model"] = untrained(parts["model"])
    return parts


def rehearse(config: Mapping[str, Any]) -> None:
    """Build a module's parts once with fake facts of the data.

    Errors in the parts are thus reported before thousands of images are read.

    Raises:
        UserError: the parts can't be built, whatever the data are.
    """
    errors = []
    with isolate_rng(), _silent():
        for numbers, images in zip(_STAND_INS, _IMAGES, strict=True):
            parts = _filled(config, numbers, images)
            if parts is None:
                return
            try:
                module = TaskModule(**parts)
                if config.get("init"):
                    from attnkit.lightning.resume.warm_start import warm_start

                    warm_start(module, config["init"])
                return
            except UserError as error:
                errors.append(error)
            except Exception:  # not about arguments; the real build raises and reports it again
                return
    first, second = errors
    if str(first) == str(second):
        raise first


def _filled(
    config: Mapping[str, Any], numbers: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the parts with nulls replaced by fake facts; None if a null can't be guessed."""
    data = config.get("data") or {}
    is_vit = (config.get("model") or {}).get("_target_") in _VITS
    facts = {**numbers, **(images if is_vit else {}), "native": bool(data.get("native"))}
    facts |= {k: data[k] for k in ("image_size", "in_channels") if data.get(k) is not None}
    if data.get("positions") is not None:  # positional encodings of a graph's nodes
        facts["position_dim"] = data.get("position_dim")
    nodes = {key: deepcopy(config.get(key) or {}) for key in schema.FILLED if key != "module"}
    for key, node in nodes.items():
        fill(node, facts)
        if "_target_" in node:
            made = build({"_target_": node["_target_"], "_partial_": True}, at=key).func
            parameters = inspect.signature(made).parameters
            nulls = [parameters.get(name) for name, value in node.items() if value is None]
            if any(found is None or found.default is not None for found in nulls):
                return None
    parts = module_parts({**config, **nodes})
    return parts if "model" in parts else None


def fill(node: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Replace nulls of a configuration by the facts of the same name."""
    node.update({k: deepcopy(facts[k]) for k, v in node.items() if v is None and k in facts})


@contextmanager
def _silent() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(level)
