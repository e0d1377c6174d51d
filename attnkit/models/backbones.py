"""Networks of timm with this toolkit's argument names, with timm's weights or others."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from attnkit.core.arguments import pair
from attnkit.core.running import evaluating
from attnkit.models.weights import (
    asking_hub,
    check_name,
    misfits,
    of_network,
    read_source,
    read_weights,
    reason,
)

_log = logging.getLogger(__name__)
# Arguments set here, which may differ from those that the weights were saved with.
_OURS = {"in_chans", "num_classes", "img_size", "drop_rate", "drop_path_rate"}


def timm_backbone(
    name: str,
    in_channels: int,
    num_classes: int,
    *,
    image_size: int | Sequence[int] | None = None,
    pretrained: bool = False,
    weights: str | Path | None = None,
    drop_path: float | None = None,
    **options: Any,
) -> nn.Module:
    """Create a network of timm by its name in timm's registry, with `timm.create_model`.

    timm fits pretrained weights: it resamples positions to another size and adapts the first layer
    to another number of channels. A head for another number of classes is replaced by a new one,
    and the logger `attnkit.models.backbones` says so.

    Args:
        name: a name of `timm.list_models()`: "resnet18", "vit_small_patch16_224", …
        in_channels: channels of the images.
        num_classes: number of logits; 0: the network returns features.
        image_size: size of the images in pixels, checked by a forward pass. None: the network's
            own size, unchecked.
        pretrained: whether to load timm's weights, which timm downloads or finds in its cache.
        weights: other weights for this network: a file (safetensors, `.pth`, a checkpoint), a
            Hugging Face folder or `hf-hub:NAME`. No code in them is run.
        drop_path: probability that a sample skips the last block (timm's `drop_path_rate`).
        **options: further arguments of `timm.create_model`.

    Raises:
        ValueError: an unknown name; weights that cannot be loaded or belong to another network; a
            size that the network cannot take; or a network that is not a classifier.
    """
    config = check_name(name)
    options |= {"in_chans": in_channels, "num_classes": num_classes}
    if drop_path is not None:
        options["drop_path_rate"] = drop_path
    size = None if image_size is None else pair("image_size", image_size)
    if size is not None and config.get("fixed_input_size"):
        options.setdefault("img_size", size)
    if weights is not None:
        if pretrained:
            raise ValueError("pretrained: not together with weights; give one of the two")
        network = _with_weights(name, str(weights), options)
    elif pretrained:
        network = _pretrained(name, config, options)
    else:
        network = timm.create_model(name, pretrained=False, **options)
    if size is not None and num_classes:
        _try_out(network, name, (1, in_channels, *size), num_classes)
    return network


def _pretrained(name: str, config: Mapping[str, Any], options: dict[str, Any]) -> nn.Module:
    if not config.get("has_weights"):
        known = timm.list_pretrained(f"{name.split('.')[0]}*")[:3]
        hint = f"; it has some for {', '.join(known)}" if known else ""
        raise ValueError(f"pretrained: timm has no weights for {name}{hint}")
    with asking_hub():
        try:
            network = timm.create_model(name, pretrained=True, **options)
        except (OSError, RuntimeError) as error:
            why = misfits(error) if isinstance(error, RuntimeError) else None
            if why:
                raise ValueError(f"pretrained: the weights of {name} do not fit: {why}") from error
            message = f"pretrained: the weights of {name} cannot be loaded: {reason(error)}"
            raise ValueError(message) from error
    here = options["num_classes"]
    if here and config["num_classes"] != here:
        _log.info(
            "pretrained: the head of %s for %d classes is replaced by one for %d",
            name, config["num_classes"], here,
        )  # fmt: skip
    return network


def _with_weights(name: str, weights: str, options: dict[str, Any]) -> nn.Module:
    try:
        source, state = read_source(weights), read_weights(weights)
    except ValueError as error:
        raise ValueError(f"weights: {error}") from error
    if source.architecture not in (None, name.split(".")[0]):
        raise ValueError(
            f"weights: {weights} holds {source.architecture}, but name is {name}; "
            f"model.name={source.architecture}"
        )
    fresh = timm.create_model(name, pretrained=False, **options)
    for key, value in source.arguments.items():
        here = options.get(key, getattr(fresh, key, "not given"))
        if key not in _OURS and here != value:
            raise ValueError(
                f"weights: {weights} was made with {key}={value}, here it is {here}; "
                f"model.{key}={value}"
            )
    try:
        given = of_network(state, fresh.state_dict())
    except ValueError as error:
        raise ValueError(f"weights: {weights}: {error}") from error
    state, note = _with_head_of(fresh, given)
    # timm's loader makes all its adaptations, but here no weight may be missing or left over
    overlay = {"state_dict": state, "num_classes": options["num_classes"], "label_offset": 0}
    if channels := _channels(fresh, state):
        config: Any = fresh.pretrained_cfg
        overlay["input_size"] = (channels, *config["input_size"][1:])
    try:
        network: Any = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, **options
        )
    except Exception as error:  # timm's converters raise any error on unknown formats
        why = misfits(error) if isinstance(error, RuntimeError) else None
        own = fresh.state_dict()
        apart = state.keys() ^ own.keys()
        if not given.keys() & own.keys():
            why = f"its names are {_first(given)}; expected {_first(own)}"
        elif apart and all(name.startswith(("norm.", "fc_norm.")) for name in apart):
            same = "true" if "fc_norm.weight" in state else "false"
            why = f"{why}; model.fc_norm={same} creates the norm that these weights have"
        raise ValueError(
            f"weights: {weights} does not fit {name}: {why or reason(error)}"
        ) from error
    network.pretrained_cfg.pop("state_dict", None)  # already in the network
    if note:
        _log.info("weights: %s: %s", weights, note)
    return network


def _first(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _with_head_of(
    fresh: nn.Module, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], str | None]:
    """Return the weights, with a new head where theirs does not fit, and a note about the head."""
    config: Any = fresh.pretrained_cfg
    heads = config.get("classifier") or ()
    own, fitted, there = fresh.state_dict(), dict(state), None
    for head in (heads,) if isinstance(heads, str) else heads:
        names = [f"{head}.{kind}" for kind in ("weight", "bias")]
        shapes = [[s[n].shape for n in names if n in s] for s in (state, own)]
        if shapes[0] == shapes[1]:
            continue
        there = state[names[0]].shape[0] if names[0] in state else 0
        fitted = {n: tensor for n, tensor in fitted.items() if n not in names}
        fitted |= {n: own[n] for n in names if n in own}
    if there is None:
        return fitted, None
    here = getattr(fresh, "num_classes", 0)
    if not there:
        return fitted, f"it has no head; that for {here} classes is new"
    return fitted, f"its head for {there} classes is replaced by one for {here}"


def _channels(fresh: nn.Module, state: dict[str, Tensor]) -> int | None:
    """Return the number of image channels that the weights were made for; None if unknown."""
    config: Any = fresh.pretrained_cfg
    first = config.get("first_conv")
    layer = f"{first}.weight" if isinstance(first, str) else ""
    own = fresh.state_dict()
    if layer not in state or layer not in own or state[layer].ndim != 4:
        return None
    return state[layer].shape[1] if own[layer].ndim == 4 else None


def _try_out(network: Any, name: str, shape: tuple[int, ...], num_classes: int) -> None:
    """Raise ValueError if the network cannot take images of this shape or returns no logits."""
    images = torch.zeros(shape)
    try:
        with evaluating(network), torch.no_grad():
            logits = network(images)
    except Exception as error:  # assertions, shapes that do not match, empty maps, …
        own = (getattr(network, "pretrained_cfg", None) or {}).get("input_size", ())
        hint = f"; its own is {own[-2]} x {own[-1]}" if len(own) == 3 else ""
        raise ValueError(
            f"image_size: {name} cannot take {shape[2]} x {shape[3]} pixels ({reason(error)}){hint}"
        ) from error
    given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != [1, num_classes]:
        raise ValueError(
            f"name: {name} is not a classifier: it gives {given} of an image, "
            f"expected [1, {num_classes}]"
        )
