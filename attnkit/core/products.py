"""The matrix product of linear layers in decoding, where no gradient is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ONEDNN", "is_linear", "plain_linear", "run_linear"]

LARGE = 2**20  # multiply-adds from which oneDNN's 30 µs of preparation are won back


def plain_linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, in float32 on the CPU by oneDNN where no gradient is wanted.

    torch computes float32 by MKL, which on AMD's processors takes up to twice as long. The
    operator is the one that torch.compile puts there; where a build lacks it, torch's own runs.
    """
    if (
        ONEDNN is None
        or tokens.dtype != torch.float32
        or weight.dtype != torch.float32
        or not tokens.is_cpu
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or tokens.numel() * len(weight) < LARGE
    ):
        return F.linear(tokens, weight, bias)
    return ONEDNN(tokens, weight, bias, "none", [], "")


def is_linear(layer: object) -> bool:
    """Whether it computes what torch's linear layer does and nothing besides."""
    return type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def run_linear(layer: nn.Module, tokens: Tensor) -> Tensor:
    """`layer(tokens)`, by `plain_linear` if it is a linear layer and nothing besides."""
    if not is_linear(layer):
        return layer(tokens)
    assert isinstance(layer, nn.Linear)
    return plain_linear(tokens, layer.weight, layer.bias)


def _found() -> Any:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        operator = torch.ops.mkldnn._linear_pointwise.default
        operator(torch.zeros(1, 1), torch.zeros(1, 1), None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return operator


ONEDNN = _found()
"""oneDNN's linear layer, or None where torch was built without."""
