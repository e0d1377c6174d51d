"""Block-sparse masks on CUDA by FlexAttention, from the plans and index functions of masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import prod
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.contexts import compiled
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
from attnkit.core.masks.kept import has_values, is_read_quickly, kept
from attnkit.core.masks.plan import QueryBlocks
from attnkit.core.masks.sequences import Causal, Packed, Padding, Window

if TYPE_CHECKING:  # the import takes half as long as importing torch
    from torch.nn.attention.flex_attention import BlockMask


PAYS = 2**24  # least queries × keys
MOST = 0.5  # largest share of queries × keys to compute, by the plan
BLOCK = 128  # queries, and keys, of a block
LISTED = 128  # least width of the lists of blocks of a row
BLOCKS_AT_ONCE = 256  # blocks, or 2²² queries × keys, at which the mask is evaluated together
READ = 2**28  # queries × keys; with fewer, evaluating all is faster than waiting for a GPU


class Flex(Backend):
    """The kernel of torch's FlexAttention, compiled; it skips blocks that the mask leaves empty."""

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
        # with fewer, a fused kernel with the dense mask is faster, and needs no compilation
        if inputs.num_queries * inputs.num_keys < PAYS:
            return False
        share = self.share(inputs)
        if share is not None:
            return share <= MOST
        sparse = Window | Window2d | Packed | Blocks
        return any(isinstance(part, sparse) for part in _simple(inputs.mask))

    def share(self, inputs: Inputs) -> float | None:
        mask, device = inputs.mask, inputs.query.device
        if mask is None or not is_read_quickly(mask, device):
            return None
        sizes = inputs.num_queries, inputs.num_keys
        return _kept(mask, "_share", sizes, device, _share)

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
        output = _flex_attention(inputs, blocks)(*tensors, options)
        if sink is not None:
            output, aux = output
            share = torch.sigmoid(aux.lse - sink[:, None])  # flex has the derivative of lse
            output = (output * share[..., None]).to(output.dtype)
        return first_channels(output, inputs.value.shape[3])


def block_mask(mask: Mask, query: Tensor, num_keys: int) -> BlockMask:
    """Return the mask as FlexAttention reads it, for query [batch, heads, queries, head_dim]."""
    batches, heads = mask.leading
    sizes = (
        query.shape[0] if batches > 1 else None,
        query.shape[1] if heads > 1 else None,
        query.shape[2],
        num_keys,
    )
    if torch.compiler.is_compiling():
        return _new_block_mask(mask, query.device, *sizes)
    return _kept(mask, "_blocks", sizes, query.device, _new_block_mask)


def _kept(
    mask: Mask, name: str, sizes: tuple, device: torch.device, make: Callable[..., Any]
) -> Any:
    """Return `make(mask, …)`, kept with the mask; for equal masks without tensors, kept once."""
    if not pytree.tree_leaves(mask):
        return _made(make, mask, device, *sizes)
    return kept(mask, name, sizes, device, partial(make, mask, device, *sizes))


@lru_cache(maxsize=32)
def _made(make: Callable[..., Any], *arguments: Any) -> Any:
    with torch.inference_mode(False):  # training may read the result later
        return make(*arguments)


def _share(mask: Mask, _: torch.device, num_queries: int, num_keys: int) -> float:
    blocks = QueryBlocks.of_size(BLOCK, num_queries, num_keys)
    return mask.plan(blocks).simplified().count(BLOCK).share


def _new_block_mask(
    mask: Mask,
    device: torch.device,
    batch: int | None,
    num_heads: int | None,
    num_queries: int,
    num_keys: int,
) -> BlockMask:
    from torch.nn.attention import flex_attention as flex

    sizes = batch, num_heads, num_queries, num_keys
    function = _function(mask.to(device).tabulated(num_queries, num_keys), num_queries, num_keys)
    waits = not is_read_quickly(mask, device) and num_queries * num_keys < READ
    if not has_values(device) or waits:
        return flex.create_block_mask(function, *sizes, device)
    # create_block_mask evaluates the mask at every query and key, and runs out of memory at 96,000
    # tokens (attention-gym 149, pytorch 151043); here it is evaluated in partial blocks only
    row, column, is_full, shape, columns = _blocks(mask, *sizes)
    lane, block = np.divmod(row, shape[2])
    of_keys = lane * columns + column
    # NumPy uses a radix sort for 16 bits
    order = of_keys.astype(np.min_scalar_type(prod(shape[:2]) * columns)).argsort(kind="stable")
    rows_of_keys = *shape[:2], columns
    by_queries = _listed(row, column, is_full, shape, columns)
    by_keys = _listed(of_keys[order], block[order], is_full[order], rows_of_keys, shape[2])
    tables = (table.to(device) for table in (*by_queries, *by_keys))
    arguments: list[Any] = [(num_queries, num_keys), *tables, (BLOCK, BLOCK), function]
    return flex.BlockMask(*arguments)


def _blocks(
    mask: Mask, batch: int | None, num_heads: int | None, num_queries: int, num_keys: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int, int], int]:
    """Return the blocks of BLOCK × BLOCK that are not empty: row, column, and whether the block is
    full; then the shape of the rows, [items, heads, query blocks], and the number of columns. A
    block that is cut by the end of the tokens is not full."""
    starts = QueryBlocks.of_size(BLOCK, num_queries, num_keys)
    shape = batch or 1, num_heads or 1, len(starts.start)
    row, column, is_full = mask.plan(starts).simplified().expanded(*shape).blocks(BLOCK)
    columns = -(-num_keys // BLOCK)
    if num_queries % BLOCK:
        is_full &= row % shape[2] < shape[2] - 1
    if num_keys % BLOCK:
        is_full &= column < columns - 1
    if isinstance(mask, Causal | Window | Padding | Blocks):
        return row, column, is_full, shape, columns  # the plans of these masks are exact
    function = _function(mask.tabulated(num_queries, num_keys), num_queries, num_keys)
    tensors = (leaf for leaf in pytree.tree_leaves(mask) if isinstance(leaf, Tensor))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    within = torch.arange(BLOCK, device=device)
    last = num_queries - 1, num_keys - 1
    is_seen = np.ones_like(is_full)
    unsure = np.flatnonzero(~is_full)
    for some in np.split(unsure, range(BLOCKS_AT_ONCE, len(unsure), BLOCKS_AT_ONCE)):
        places = np.stack([*np.unravel_index(row[some], shape), column[some]])
        item, head, first, start = torch.from_numpy(places).to(device)[..., None, None]
        query, key = first * BLOCK + within[:, None], start * BLOCK + within
        allowed = function(item, head, query.clamp(max=last[0]), key.clamp(max=last[1]))
        allowed = allowed & (query <= last[0]) & (key <= last[1])
        allowed = allowed.expand(len(some), BLOCK, BLOCK).flatten(1)
        is_full[some], is_seen[some] = allowed.all(1).cpu(), allowed.any(1).cpu()
    return row[is_seen], column[is_seen], is_full[is_seen], shape, columns


def _listed(
    row: np.ndarray,
    column: np.ndarray,
    is_full: np.ndarray,
    shape: tuple[int, int, int],
    num_columns: int,
) -> Iterator[Tensor]:
    """Yield, for partial and then for full blocks, the number of each row's blocks and a list of
    their columns; blocks × blocks would be too many numbers for long sequences. Both lists have the
    same width, because the kernel for few queries reads only that of the first. Widths are rounded,
    because each width is compiled."""
    num_rows = prod(shape)
    chosen = ~is_full, is_full
    counts = [np.bincount(row[some], minlength=num_rows) for some in chosen]
    most = max(int(count.max()) for count in counts)
    width = min(num_columns, max(LISTED, 1 << most.bit_length()))
    for some, count in zip(chosen, counts, strict=True):
        columns = np.zeros((num_rows, width), np.int32)
        place = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        columns[row[some], place] = column[some]
        yield torch.from_numpy(count.astype(np.int32)).view(shape)
        yield torch.from_numpy(columns).view(*shape, width)


def _function(mask: Mask, num_queries: int, num_keys: int) -> Callable[..., Tensor]:
    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.allows(batch, head, query, key, num_queries, num_keys)

    return may_look


def _flex_attention(inputs: Inputs, blocks: BlockMask) -> Callable[..., Any]:
    if torch.compiler.is_compiling():
        return _call_flex
    tensors = inputs.query, inputs.key, inputs.value
    kinds = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
    mask = None if pytree.tree_leaves(inputs.mask) else inputs.mask
    widths = blocks.kv_indices.shape, getattr(blocks.q_indices, "shape", None)
    program = _compiled((*kinds, *widths, torch.is_grad_enabled(), mask))

    def run(*arguments: Any) -> Any:
        with compiled():
            return program(*arguments)

    return run


@lru_cache(maxsize=256)
def _compiled(_: tuple) -> Callable[..., Any]:
    """Return a program for these kinds of tensors. torch.compile compiles the code of one function
    at most eight times and then raises an error; a few layers, trained and evaluated, need more."""
    code = _call_flex.__code__.replace()  # a copy
    return torch.compile(FunctionType(code, globals()), dynamic=False)


def _call_flex(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
    from torch.nn.attention import flex_attention as flex

    return flex.flex_attention(query, key, value, **options)


def _simple(mask: Mask | None) -> Iterator[Mask]:
    """Yield the masks that a combination is made of."""
    if isinstance(mask, And | Or):
        for part in mask.masks:
            yield from _simple(part)
    elif isinstance(mask, Not):
        yield from _simple(mask.mask)
    elif mask is not None:
        yield mask
