"""The linear layer y = x Wᵀ + b by the faster of the two libraries that torch computes it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.operators import sparse
from attnkit.core.operators.plain import is_plain
from attnkit.core.precision import no_autocast

LARGE = 2**20  # multiply-adds from which oneDNN's 30 µs of preparation are won back,
LARGE_WITH_GRADIENT = 2**22  # and those of the backward
EVERY_ROW = slice(None)


def linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, also of sparse CSR tokens under autocast.

    torch multiplies a sparse matrix in full precision only.

    In float32 on AMD's processors by oneDNN, with its gradients of any order: torch computes them
    by MKL, which takes up to twice as long on some of them. The operator is the one that
    torch.compile puts there; whatever looks into operators, as tracing and torch.func do, sees
    torch's own.
    """
    if tokens.layout is not torch.strided:  # in full precision only
        with no_autocast(tokens):
            weight = weight.to(tokens.dtype)
            if not sparse.serves(tokens, weight):
                return F.linear(tokens, weight, bias)
            output = sparse.product(tokens, weight.T)
            return output if bias is None else output + bias
    if not _is_onednns(tokens, weight):
        return F.linear(tokens, weight, bias)
    if not torch.is_grad_enabled() or not (
        tokens.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _onednn(tokens, weight, bias)
    if tokens.numel() * len(weight) < LARGE_WITH_GRADIENT:
        return F.linear(tokens, weight, bias)
    return _Linear.apply(tokens, weight, bias)


def run_linear(layer: nn.Module, tokens: Tensor, rows: slice = EVERY_ROW) -> Tensor:
    """`layer(tokens)[..., rows]`, by `linear` if it is torch's linear layer and nothing besides.

    Of other layers, such as those of `attnkit.finetune.lora`, by their method `run_rows`.
    """
    if not is_linear(layer):
        if rows == EVERY_ROW:
            return layer(tokens)
        run_rows: Any = getattr(layer, "run_rows", None)
        if run_rows is not None:
            return run_rows(tokens, rows)
    assert isinstance(layer, nn.Linear)
    if rows == EVERY_ROW:
        return linear(tokens, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias[rows]
    return linear(tokens, layer.weight[rows], bias)


def is_linear(layer: object) -> bool:
    """Whether it computes what torch's linear layer does and nothing besides."""
    return type(layer) is nn.Linear and not (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def reset_linear(layer: nn.Linear) -> None:
    """Xavier-uniform matrix, bias 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Of a frozen weight the tokens are not kept, nor the weight where no token was computed.
        needs_tokens, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(tokens if needs_weight else None, weight if needs_tokens else None)
        ctx.save_for_forward(tokens, weight)
        return _onednn(tokens, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            linear(gradient, weight.mT, None) if ctx.needs_input_grad[0] else None,
            _product(rows, tokens.reshape(len(rows), -1)) if ctx.needs_input_grad[1] else None,
            rows.sum(dim=0) if ctx.needs_input_grad[2] else None,
        )

    @staticmethod
    def jvp(ctx: Any, tokens: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Any:
        x, w = ctx.saved_tensors
        terms = [
            None if tokens is None else F.linear(tokens, w),
            None if weight is None else F.linear(x, weight),
            None if bias is None else bias.expand(*x.shape[:-1], -1),
        ]
        return sum(term for term in terms if term is not None)


def _product(gradient: Tensor, tokens: Tensor) -> Tensor:
    """The weight's gradient. torch is faster with many rows; oneDNN with the longer side last."""
    if len(gradient) > gradient.shape[1] + tokens.shape[1]:
        return gradient.mT @ tokens
    if gradient.shape[1] > tokens.shape[1]:
        return linear(tokens.mT, gradient.mT, None).mT
    return linear(gradient.mT, tokens.mT, None)


def _is_onednns(tokens: Tensor, weight: Tensor) -> bool:
    return (
        ONEDNN is not None
        and tokens.dtype == weight.dtype == torch.float32
        and is_plain(tokens, weight)
        and tokens.numel() * len(weight) >= LARGE  # a guard on a size, were it traced
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ONEDNN(tokens, weight, bias, "none", [], "")


def _found() -> Any:
    if not (_is_amd() and torch.backends.mkldnn.is_available()):
        return None
    try:
        operator = torch.ops.mkldnn._linear_pointwise.default
        operator(torch.zeros(1, 1), torch.zeros(1, 1), None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return operator


def _is_amd() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return "AuthenticAMD" in file.read(4096)
    except OSError:
        return False


ONEDNN = _found()
"""oneDNN's linear layer, or None where MKL is as fast or torch was built without."""
