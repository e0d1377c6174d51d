"""FlexAttention: block-sparse masks on CUDA, from the plans of masks and their index functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import (
    Backend,
    device_reasons,
    dot_product_reasons,
    dropout_reasons,
    empty_reasons,
    first_channels,
    multiple_of_8,
    with_channels,
)
from attnkit.core.masks.base import And, Mask, Not, Or
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.grids import Blocks, Window2d
from attnkit.core.masks.kept import has_values, kept
from attnkit.core.masks.plan import QueryBlocks
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window

if TYPE_CHECKING:  # importing it takes as long as importing half of torch
    from torch.nn.attention.flex_attention import BlockMask


PAYS = 2**24  # queries × keys
BLOCK = 128  # queries and keys of a block
BLOCKS_AT_ONCE = 256  # whose 2²² queries and keys are looked at together
READ = 2**28  # queries × keys, before which looking at all is quicker than waiting for a GPU


class Flex(Backend):
    """torch's FlexAttention, compiled; skips the blocks that the mask leaves empty."""

    name = "flex"
    has_sink = True
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
        # before, a fused kernel with the dense mask is faster, and nothing is compiled
        sparse = Window | Window2d | Packed | Blocks
        return inputs.num_queries * inputs.num_keys >= PAYS and any(
            isinstance(part, sparse) for part in _simple(inputs.mask)
        )

    def compute(self, inputs: Inputs) -> Tensor:
        inputs = inputs.as_scaled_dot()
        assert inputs.mask is not None
        blocks = block_mask(inputs.mask, inputs.query, inputs.num_keys)
        tensors = (
            with_channels(tensor, max(16, multiple_of_8(tensor.shape[3])))
            for tensor in (inputs.query, inputs.key, inputs.value)
        )
        options = {"block_mask": blocks, "scale": inputs.scale, "enable_gqa": inputs.is_grouped}
        sink = inputs.sink
        if sink is not None:
            from torch.nn.attention import flex_attention as flex

            options["return_aux"] = flex.AuxRequest(lse=True)
        output = _flex_attention(inputs)(*tensors, options)
        if sink is not None:
            output, aux = output
            share = torch.sigmoid(aux.lse - sink[:, None])  # of which flex has the derivative
            output = (output * share[..., None]).to(output.dtype)
        return first_channels(output, inputs.value.shape[3])


def block_mask(mask: Mask, query: Tensor, num_keys: int) -> BlockMask:
    """The mask as FlexAttention reads it, for query [batch, heads, queries, head_dim]."""
    batches, heads = mask.leading
    sizes = (
        query.shape[0] if batches > 1 else None,
        query.shape[1] if heads > 1 else None,
        query.shape[2],
        num_keys,
    )
    if torch.compiler.is_compiling():
        return _new_block_mask(mask, sizes, query.device)
    if not pytree.tree_leaves(mask):  # one of the same numbers has the same blocks
        return _kept_block_mask(mask, sizes, query.device)
    make = partial(_new_block_mask, mask, sizes, query.device)
    return kept(mask, "_blocks", sizes, query.device, make)


@lru_cache(maxsize=16)
def _kept_block_mask(mask: Mask, sizes: tuple, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # for training too
        return _new_block_mask(mask, sizes, device)


def _new_block_mask(mask: Mask, sizes: tuple, device: torch.device) -> BlockMask:
    from torch.nn.attention import flex_attention as flex

    batch, num_heads, num_queries, num_keys = sizes
    moved = mask.to(device).tabulated(num_queries, num_keys)
    function = _function(moved, num_queries, num_keys)
    tensors = [leaf for leaf in pytree.tree_leaves(mask) if isinstance(leaf, Tensor)]
    is_read_quickly = all(tensor.is_cpu for tensor in tensors)
    if not has_values(device) or not (is_read_quickly or num_queries * num_keys >= READ):
        return flex.create_block_mask(function, batch, num_heads, num_queries, num_keys, device)
    # create_block_mask looks at each query and key, and runs out of memory at 96,000 tokens
    # (attention-gym 149, pytorch 151043); here queries and keys of partial blocks are looked at
    full, partial = (table.to(device) for table in _tables(mask, *sizes))
    return flex.BlockMask.from_kv_blocks(
        *_counted(partial),
        *_counted(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=function,
        seq_lengths=(num_queries, num_keys),
    )


def _tables(
    mask: Mask, batch: int | None, num_heads: int | None, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Which blocks of BLOCK × BLOCK the mask allows all and which some of, each [items, heads,
    query blocks, key blocks]. A block that is cut by the end of the tokens is not full."""
    blocks = QueryBlocks.of_size(BLOCK, num_queries, num_keys)
    plan = mask.plan(blocks).simplified().expanded(batch or 1, num_heads or 1, len(blocks.start))
    full, seen = (torch.from_numpy(table) for table in plan.tables(BLOCK))
    if num_queries % BLOCK:
        full[:, :, -1] = False
    if num_keys % BLOCK:
        full[..., -1] = False
    partial = seen & ~full
    if isinstance(mask, Causal | Window | Padding | Blocks):
        return full, partial  # whose plans are exact
    function = _function(mask.tabulated(num_queries, num_keys), num_queries, num_keys)
    tensors = (leaf for leaf in pytree.tree_leaves(mask) if isinstance(leaf, Tensor))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    within = torch.arange(BLOCK, device=device)
    for where in partial.nonzero().split(BLOCKS_AT_ONCE):
        item, head, row, column = where.to(device)[:, :, None, None].unbind(1)
        query, key = row * BLOCK + within[:, None], column * BLOCK + within
        last = num_queries - 1, num_keys - 1
        allowed = function(item, head, query.clamp(max=last[0]), key.clamp(max=last[1]))
        allowed = allowed & (query <= last[0]) & (key <= last[1])
        allowed = allowed.expand(len(where), BLOCK, BLOCK).flatten(1)
        every, some = allowed.all(1).cpu(), allowed.any(1).cpu()
        full[where.unbind(1)] = every
        partial[where.unbind(1)] = some & ~every
    return full, partial


def _counted(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are True, and their columns before those of the others."""
    columns = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), columns.to(torch.int32)


def _function(mask: Mask, num_queries: int, num_keys: int) -> Callable[..., Tensor]:
    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.allows(batch, head, query, key, num_queries, num_keys)

    return may_look


def _flex_attention(inputs: Inputs) -> Callable[..., Any]:
    if torch.compiler.is_compiling():
        return _call_flex
    tensors = inputs.query, inputs.key, inputs.value
    kinds = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
    mask = None if pytree.tree_leaves(inputs.mask) else inputs.mask
    return _compiled((*kinds, torch.is_grad_enabled(), mask))


@lru_cache(maxsize=256)
def _compiled(_: tuple) -> Callable[..., Any]:
    """A program for these kinds of tensors: torch.compile makes eight of one function's code, and
    raises an error at the next, which several layers with training and prediction soon are."""
    code = _call_flex.__code__.replace()  # a copy
    return torch.compile(FunctionType(code, globals()), dynamic=False)


def _call_flex(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
    from torch.nn.attention import flex_attention as flex

    return flex.flex_attention(query, key, value, **options)


def _simple(mask: Mask | None) -> Iterator[Mask]:
    """The masks that the mask is made of."""
    if isinstance(mask, And | Or):
        for part in mask.masks:
            yield from _simple(part)
    elif isinstance(mask, Not):
        yield from _simple(mask.mask)
    elif mask is not None:
        yield mask
