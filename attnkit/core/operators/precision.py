"""Regions that compute in the precision they are given."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# A list, since torch.compile of torch 2.11 cannot ask torch.amp.is_autocast_available.
WITHOUT_AUTOCAST = {"fpga", "lazy", "meta", "mkldnn", "vulkan"}


def no_autocast(like: Tensor) -> AbstractContextManager:
    """A context without autocast on the device of a tensor; some devices, such as meta, have
    none."""
    device_type = like.device.type
    if device_type in WITHOUT_AUTOCAST:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in another dtype, where finite stays finite: a −1e9 must not forbid in float16."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)
