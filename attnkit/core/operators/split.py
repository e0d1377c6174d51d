"""Channels of a fused projection taken apart, and their gradients joined without a copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.core.operators.plain import is_plain


def split_channels(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """`tensor.split(sizes, dim=-1)`, with its gradients of any order.

    Where a kernel leaves the gradients of the parts next to each other, as those of edges do, they
    are the gradient of the whole as they stand; torch's split would copy them.
    """
    if tensor.requires_grad and torch.is_grad_enabled() and is_plain(tensor):
        return _Split.apply(tensor, sizes)
    return tensor.split(sizes, dim=-1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        return tensor.split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = None if torch.is_grad_enabled() else _whole(gradients)
        return torch.cat(gradients, dim=-1) if whole is None else whole, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, sizes: None) -> tuple[Tensor, ...]:
        return tangent.split(ctx.sizes, dim=-1)


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose channels these are, one after the other, if they stand so in memory."""
    first = parts[0]
    if first.stride(-1) != 1:
        return None
    start, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == start and part.data_ptr() == end
        if part.stride() != first.stride() or not is_next:
            return None
        end += part.shape[-1] * part.element_size()
    width = sum(part.shape[-1] for part in parts)
    return first.as_strided((*first.shape[:-1], width), first.stride())
