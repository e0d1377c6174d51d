"""Sliding windows for torch.compile and torch.export, as programs whose number of operators does
not depend on the batch and the tokens.

    blocks of queries × the run of keys that each reaches, all as one batch of attention

The queries of a sequence are cut into blocks. The run of keys of a block consists of two or three
blocks of keys side by side, so that each key is copied two or three times. A grid is cut along its
rows, then along its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.base import first_channels, with_channels
from attnkit.core.kernels.block_steps import TILE, grid_of
from attnkit.core.kernels.sdpa import revive
from attnkit.core.masks.base import Mask
from attnkit.core.operators.precision import cast_bias

LEAST_BLOCK = 64  # queries of a block of a sequence


@dataclass(frozen=True)
class Axis:
    """A sequence, or the rows or columns of a grid, whose query i reaches the keys i + lower … i +
    upper.

    least: the least number of queries of a block.
    """

    num_queries: int
    num_keys: int
    lower: int
    upper: int
    least: int

    @property
    def block(self) -> int:
        """The number of queries of a block: half of the keys that one of them reaches."""
        return max(self.least, (self.upper - self.lower + 1) // 2)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_queries // self.block)

    @property
    def num_pieces(self) -> int:
        """The number of blocks of keys of a run."""
        return 2 if statically_known_true(self.upper - self.lower <= self.block) else 3

    def blocks(self, tensor: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Divide the queries along `dim` into two dimensions, blocks and queries of a block."""
        missing = self.num_blocks * self.block - self.num_queries
        return _padded(tensor, dim, 0, missing, fill).unflatten(dim, (self.num_blocks, self.block))

    def runs(self, tensor: Tensor, dim: int, fill: int = 0) -> Tensor:
        """Divide the keys along `dim` into two dimensions, blocks and keys that a block reaches."""
        size, count = self.block, self.num_blocks
        after = (count + self.num_pieces - 1) * size + self.lower - self.num_keys
        keys = _padded(tensor, dim, -self.lower, after, fill)
        pieces = [
            keys.narrow(dim, i * size, count * size).unflatten(dim, (count, size))
            for i in range(self.num_pieces)
        ]
        return torch.cat(pieces, dim + 1)


def axes_of(mask: Mask, num_queries: int, num_keys: int) -> list[Axis]:
    """Return the axis of a window's sequence, or those of the rows and columns of its grid."""
    grid = grid_of(mask)
    if grid is not None:
        sizes = (grid.height, grid.radius_h), (grid.width, grid.radius_w)
        return [Axis(size, size, -radius, radius, TILE) for size, radius in sizes]
    lower, upper = mask.band(num_queries, num_keys)
    assert lower is not None
    assert upper is not None
    return [Axis(num_queries, num_keys, lower, max(lower, upper), LEAST_BLOCK)]


def program_pays(inputs: Inputs) -> bool:
    """Return whether a run is shorter than all keys, or the number of keys is unknown."""
    assert inputs.mask is not None
    run = 1
    for axis in axes_of(inputs.mask, inputs.num_queries, inputs.num_keys):
        run *= axis.num_pieces * axis.block
    return not statically_known_true(inputs.num_keys <= run)


def window_program(inputs: Inputs) -> Tensor:
    """Compute attention within the window by a fixed number of operators of torch."""
    mask = inputs.mask
    assert mask is not None
    grid = grid_of(mask)
    axes = axes_of(mask, inputs.num_queries, inputs.num_keys)
    prefix = 0 if grid is None else grid.num_prefix_tokens
    dim = max(inputs.query.shape[3], inputs.value.shape[3])
    query, key, value = (
        with_channels(tensor, dim) for tensor in (inputs.query, inputs.key, inputs.value)
    )
    sizes = inputs.num_queries, inputs.num_keys
    queries, keys = (torch.arange(size, device=query.device) for size in sizes)
    rows = _laid(queries.view(1, 1, -1, 1), axes, Axis.blocks, prefix, fill=-1)[:, 0, :, 0]
    columns = _laid(keys.view(1, 1, -1, 1), axes, Axis.runs, prefix, fill=-1)[:, 0, :, 0]
    columns = torch.cat([keys[:prefix].expand(columns.shape[0], -1), columns], dim=1)
    output = _attended(
        replace(
            inputs,
            query=_laid(query, axes, Axis.blocks, prefix),
            key=_with_prefix(key, axes, prefix),
            value=_with_prefix(value, axes, prefix),
        ),
        _term(inputs, rows, columns),
        inputs.scale,
    )
    output = _joined(output, query.shape[0], axes)
    if prefix:  # prefix tokens see everything
        first = replace(inputs, query=query[:, :, :prefix], key=key, value=value)
        term = _term(inputs, queries[None, :prefix], keys[None])
        output = torch.cat([_attended(first, term, inputs.scale), output], dim=2)
    return first_channels(output, inputs.value.shape[3])


def _attended(inputs: Inputs, term: Tensor, scale: float) -> Tensor:
    """Call torch's function; the scale is that of the channels before padding."""
    if inputs.sink is not None:
        inputs = replace(inputs, mask=None, bias=term).sink_as_key()
        assert inputs.bias is not None
        term = inputs.bias
    term, alive = revive(term) if torch.compiler.is_exporting() else (term, None)
    output = F.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value,
        attn_mask=term, scale=scale, enable_gqa=inputs.is_grouped,
    )  # fmt: skip
    return output if alive is None else output.masked_fill(~alive, 0.0)


def _term(inputs: Inputs, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the term that is added to the scores, [batch · blocks, 1 or heads, queries, keys], for
    the tokens rows [blocks, queries] and columns [blocks, keys]; −1 is padding."""
    mask, bias, device = inputs.mask, inputs.bias, inputs.query.device
    assert mask is not None
    batch, num_heads = inputs.query.shape[:2]
    places = (
        torch.arange(batch, device=device).view(-1, 1, 1, 1, 1),
        torch.arange(num_heads, device=device)[:, None, None],
        rows.clamp(min=0)[:, None, :, None],
        columns.clamp(min=0)[:, None, None, :],
    )
    allowed = mask.allows(*places, inputs.num_queries, inputs.num_keys)
    term = torch.zeros((), dtype=inputs.query.dtype, device=device)
    if bias is not None:
        sizes = bias.shape
        term = bias[tuple(i if n > 1 else i * 0 for i, n in zip(places, sizes, strict=True))]
        term = cast_bias(term, inputs.query.dtype)
    term = torch.where(allowed, term, -torch.inf)
    term = term.masked_fill((columns < 0)[:, None, None], -torch.inf)
    return term.expand(batch, *term.shape[-4:]).flatten(0, 1)


def _laid(
    tensor: Tensor,
    axes: Sequence[Axis],
    cut: Callable[..., Tensor],
    prefix: int,
    fill: int = 0,
) -> Tensor:
    """Return [batch, heads, tokens, dim] as [batch · blocks, heads, tokens of a block, dim]."""
    if len(axes) == 2:
        size = [axis.num_keys for axis in axes]
        tensor = tensor[:, :, prefix:].unflatten(2, size)
    for i, axis in enumerate(axes):
        tensor = cut(axis, tensor, 2 + 2 * i, fill)
    blocks, tokens = range(2, tensor.ndim - 1, 2), range(3, tensor.ndim - 1, 2)
    tensor = tensor.permute(0, *blocks, 1, *tokens, tensor.ndim - 1)
    return tensor.flatten(len(axes) + 2, -2).flatten(0, len(axes))


def _with_prefix(tensor: Tensor, axes: Sequence[Axis], prefix: int) -> Tensor:
    """Return the keys or values of each block, those of the prefix first."""
    runs = _laid(tensor, axes, Axis.runs, prefix)
    if not prefix:
        return runs
    count = runs.shape[0] // tensor.shape[0]
    return torch.cat([tensor[:, :, :prefix].repeat_interleave(count, 0), runs], dim=2)


def _joined(output: Tensor, batch: int, axes: Sequence[Axis]) -> Tensor:
    """Return [batch · blocks, heads, tokens of a block, dim] as [batch, heads, tokens, dim]."""
    counts, sizes = ([getattr(axis, n) for axis in axes] for n in ("num_blocks", "block"))
    output = output.unflatten(2, sizes).unflatten(0, (batch, *counts))
    heads = 1 + len(axes)
    places = [place for i in range(len(axes)) for place in (1 + i, heads + 1 + i)]
    output = output.permute(0, heads, *places, output.ndim - 1)
    for i, axis in enumerate(axes):
        output = output.flatten(2 + i, 3 + i).narrow(2 + i, 0, axis.num_queries)
    return output.flatten(2, -2)


def _padded(tensor: Tensor, dim: int, before: int, after: int, fill: int) -> Tensor:
    """Pad the tensor at both ends of a dimension; a negative number cuts it off."""
    others = tensor.ndim - 1 - dim
    return F.pad(tensor, (0, 0) * others + (before, after), value=fill)
