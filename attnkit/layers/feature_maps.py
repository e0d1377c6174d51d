"""Attention of feature maps by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from torch import nn

FEATURE_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "se": ("attnkit.layers.gates.squeeze_excitation:SqueezeExcitation", {}),
    "eca": ("attnkit.layers.gates.efficient_channel:EfficientChannelAttention", {}),
    "cbam": ("attnkit.layers.gates.cbam:CBAM", {}),
    "bam": ("attnkit.layers.gates.bam:BAM", {}),
    "scse": ("attnkit.layers.gates.squeeze_excitation:SCSE", {}),
    "coordinate": ("attnkit.layers.gates.coordinate:CoordinateAttention", {}),
    "spatial": ("attnkit.layers.maps.spatial:SpatialAttention", {}),
    "window": ("attnkit.layers.maps.spatial:SpatialAttention", {"pattern": "window"}),
    "axial": ("attnkit.layers.maps.spatial:SpatialAttention", {"pattern": "axial"}),
    "criss_cross": ("attnkit.layers.maps.spatial:SpatialAttention", {"pattern": "criss_cross"}),
    "channel": ("attnkit.layers.maps.channel:ChannelAttention", {}),
    "xca": ("attnkit.layers.maps.channel:CrossCovarianceAttention", {}),
    "transposed": ("attnkit.layers.maps.channel:TransposedAttention", {}),
    "context": ("attnkit.layers.maps.context:ContextAttention", {}),
    "danet": ("attnkit.layers.maps.dual:DualAttention", {}),
}
"""By name, where the class is, "module:Class", and the options that the name stands for."""


def make_feature_attention(
    attention: str | Callable[..., nn.Module], channels: int, **options: Any
) -> nn.Module:
    """Attention of maps [batch, channels, height, width], which gives back maps of that shape.

    Args:
        attention: a name of `FEATURE_ATTENTION`, a class, or any function from `channels` and
            options to a module.
        channels: of the maps.
        options: keyword arguments of the class; with a name, they replace those it stands for.

    Raises:
        ValueError: an unknown name; the names there are, and the nearest.
        TypeError: an option that the class does not have, or anything else than the above.
    """
    if isinstance(attention, str):
        target, defaults = _find(attention)
        options = {**defaults, **options}
        module, _, name = target.partition(":")
        attention = getattr(import_module(module), name)
    if isinstance(attention, nn.Module):
        raise TypeError(
            "attention: expected a name, a class or a function from channels to a module, got the "
            f"module {type(attention).__name__} itself; every place needs one of its own"
        )
    if not callable(attention):
        raise TypeError(
            "attention: expected a name, a class or a function from channels to a module, "
            f"got {attention!r}"
        )
    _check_options(attention, channels, options)
    made = attention(channels, **options)
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"attention: expected a module from {_name(attention)}({channels}), "
            f"got {type(made).__name__}"
        )
    return made


def _find(name: str) -> tuple[str, dict[str, Any]]:
    if name in FEATURE_ATTENTION:
        return FEATURE_ATTENTION[name]
    near = get_close_matches(name, FEATURE_ATTENTION, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"attention: expected one of {', '.join(FEATURE_ATTENTION)}, got {name!r}{hint}"
    )


def _check_options(attention: Callable[..., Any], channels: int, options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(attention)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(channels, **options)
    except TypeError as error:
        known = [
            name
            for name, parameter in list(signature.parameters.items())[1:]
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise TypeError(f"{_name(attention)}: {error}; it {takes}") from None


def _name(attention: Callable[..., Any]) -> str:
    return getattr(attention, "__name__", type(attention).__name__)
