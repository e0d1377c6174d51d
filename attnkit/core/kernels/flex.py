"""FlexAttention: block-sparse masks on CUDA, from the masks' own index functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
)
from attnkit.core.masks.base import And, Mask, Not, Or
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.grids import Blocks, Window2d
from attnkit.core.masks.sequences import Packed, Window

if TYPE_CHECKING:  # importing it takes as long as importing half of torch
    from torch.nn.attention.flex_attention import BlockMask


class Flex(Backend):
    """torch's FlexAttention, compiled; skips the blocks that the mask leaves empty."""

    name = "flex"
    needs_mask = "a mask"

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        yield from device_reasons(inputs, "cuda")
        yield from empty_reasons(inputs)
        yield from dot_product_reasons(inputs)
        if any(isinstance(part, Edges) for part in _simple(inputs.mask)):
            yield "cannot compile the mask Edges"
        if inputs.query.dtype == torch.float64:
            yield "needs float32, bfloat16 or float16, got torch.float64"
        if inputs.bias is not None:
            yield "cannot read a bias"
        yield from dropout_reasons(inputs)

    def pays(self, inputs: Inputs) -> bool:
        sparse = Window | Window2d | Packed | Blocks
        return any(isinstance(part, sparse) for part in _simple(inputs.mask))

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        value_dim = inputs.value.shape[3]
        assert inputs.mask is not None
        blocks = block_mask(inputs.mask, inputs.query, inputs.num_keys)
        output = _flex_attention(torch.compiler.is_compiling())(
            _pad(inputs.query),
            _pad(inputs.key),
            _pad(inputs.value),
            block_mask=blocks,
            scale=inputs.scale,
            enable_gqa=inputs.is_grouped,
        )
        return output[..., :value_dim]


def block_mask(mask: Mask, query: Tensor, num_keys: int) -> BlockMask:
    """The mask as FlexAttention reads it, for query [batch, heads, queries, head_dim]."""
    mask = mask.to(query.device)
    batches, heads = mask.leading
    sizes = (
        query.shape[0] if batches > 1 else None,
        query.shape[1] if heads > 1 else None,
        query.shape[2],
        num_keys,
    )
    # tensors may be changed in place, so only a mask without any has blocks worth keeping
    if pytree.tree_leaves(mask) or torch.compiler.is_compiling():
        return _new_block_mask(mask, sizes, query.device)
    return _kept_block_mask(mask, sizes, query.device)


@lru_cache(maxsize=16)
def _kept_block_mask(mask: Mask, sizes: tuple, device: torch.device) -> BlockMask:
    return _new_block_mask(mask, sizes, device)


def _new_block_mask(mask: Mask, sizes: tuple, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, num_heads, num_queries, num_keys = sizes
    function = _function(mask, num_queries, num_keys)
    return create_block_mask(function, batch, num_heads, num_queries, num_keys, device)


def _function(mask: Mask, num_queries: int, num_keys: int) -> Callable[..., Tensor]:
    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.allows(batch, head, query, key, num_queries, num_keys)

    return may_look


@cache
def _flex_attention(is_compiling: bool) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as flex

    function: Callable[..., Any] = flex.flex_attention
    return function if is_compiling else torch.compile(function, dynamic=False)


def _simple(mask: Mask | None) -> Iterator[Mask]:
    """The masks that the mask is made of."""
    if isinstance(mask, And | Or):
        for part in mask.masks:
            yield from _simple(part)
    elif isinstance(mask, Not):
        yield from _simple(mask.mask)
    elif mask is not None:
        yield mask


def _pad(tensor: Tensor) -> Tensor:
    missing = max(16, -(-tensor.shape[3] // 8) * 8) - tensor.shape[3]
    return F.pad(tensor, (0, missing)) if missing else tensor
