"""Attention over feature maps by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from attnkit import layers
from attnkit.core.names import nearest

FEATURE_ATTENTION: dict[str, Callable[..., nn.Module]] = {
    "se": layers.SqueezeExcitation,
    "eca": layers.EfficientChannelAttention,
    "cbam": layers.CBAM,
    "bam": layers.BAM,
    "scse": layers.SCSE,
    "coordinate": layers.CoordinateAttention,
    "spatial": layers.SpatialAttention,
    "window": partial(layers.SpatialAttention, pattern="window"),
    "axial": partial(layers.SpatialAttention, pattern="axial"),
    "criss_cross": partial(layers.SpatialAttention, pattern="criss_cross"),
    "channel": layers.ChannelAttention,
    "xca": layers.CrossCovarianceAttention,
    "transposed": layers.TransposedAttention,
    "context": layers.ContextAttention,
    "danet": layers.DualAttention,
}


def make_feature_attention(
    attention: str | Callable[..., nn.Module], channels: int, **options: Any
) -> nn.Module:
    """Create attention over maps [batch, channels, height, width] that returns the same shape.

    Args:
        attention: a name of `FEATURE_ATTENTION`, a class, or any function from `channels` and
            options to a module.
        channels: channels of the maps.
        options: keyword arguments of the class; with a name, they override those it stands for.

    Raises:
        ValueError: an unknown name; the error lists the names and the nearest.
        TypeError: an option that the class does not have, or an `attention` of another type.
    """
    if isinstance(attention, str):
        attention = _named(attention)
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
            f"attention: expected a module from {_name_of(attention)}({channels}), "
            f"got {type(made).__name__}"
        )
    return made


def _named(name: str) -> Callable[..., nn.Module]:
    if name in FEATURE_ATTENTION:
        return FEATURE_ATTENTION[name]
    hint = nearest(name, FEATURE_ATTENTION)
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
        raise TypeError(f"{_name_of(attention)}: {error}; it {takes}") from None


def _name_of(attention: Callable[..., Any]) -> str:
    function = attention.func if isinstance(attention, partial) else attention
    return getattr(function, "__name__", type(function).__name__)
