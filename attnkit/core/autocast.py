"""Regions that compute in the precision they are given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_dtype", "no_autocast"]

# A list, since torch.compile of torch 2.11 cannot ask torch.amp.is_autocast_available.
WITHOUT_AUTOCAST = {"fpga", "lazy", "meta", "mkldnn", "vulkan"}


def no_autocast(like: Tensor) -> AbstractContextManager:
    """A block in which nothing is cast, on the device of a tensor; some, such as meta, never do."""
    device_type = like.device.type
    if device_type in WITHOUT_AUTOCAST:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """What autocast casts to on the device of a tensor; None where it is off."""
    device_type = like.device.type
    if device_type in WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
