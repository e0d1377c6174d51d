"""Queries of torch's state: whether it traces, transforms or differentiates the running code."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = {Tensor, nn.Parameter}


def is_plain(*tensors: Tensor) -> bool:
    """Return whether all are plain tensors on a CPU, outside of tracing and torch.func; operators
    may then be replaced by faster ones with equal results."""
    return all(tensor.is_cpu and type(tensor) in PLAIN for tensor in tensors) and not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def has_tangent(tensors: Iterable[object]) -> bool:
    """Return whether one of the tensors takes part in forward-mode differentiation."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or any(
        isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )
