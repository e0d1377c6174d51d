"""Functions of attention's inputs, computed a block of batch items and query rows at a time.

Forward and backward hold the inputs, the output, their gradients and a few blocks: the backward
calls the function again for each block (Chen et al., Training Deep Nets with Sublinear Memory Cost,
2016), with the same random numbers. The graphs of the last blocks are kept for the backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, compress, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import TRACED_PARTS, unwritten
from attnkit.core.kernels.block_steps import query_blocks
from attnkit.core.masks.base import Mask, as_4d
from attnkit.core.masks.kept import is_read_quickly, kept
from attnkit.core.masks.plan import SOME
from attnkit.core.operators.cpu import has_tangent
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import ScaledDot

BlockFunction = Callable[[Inputs, "Tensor | None"], tuple[Tensor, ...]]
"""A function of the inputs of some batch items and query rows, and their mask, that returns tensors
[batch, heads, rows, ...]."""


@dataclass(frozen=True)
class Read:
    """The keys that a block reads, as runs (first key, number of keys), and whether the mask hides
    some of them."""

    runs: tuple[tuple[int, int], ...]
    is_masked: bool

    @property
    def num_keys(self) -> int:
        return sum(size for _, size in self.runs)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the runs of a tensor."""
        parts = [tensor.narrow(dim, start, size) for start, size in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


Sizes = tuple[list[int], list[int]]
"""The numbers of batch items of the blocks, and of query rows."""

Reads = dict[tuple[int, int], Read]
"""The keys of blocks, by their first batch item and row; empty if all blocks read all keys."""

Graph = tuple[dict[str, Tensor], tuple[Tensor, ...]]
"""The tensors of a block, and the function's outputs for them."""

LEAST_KEYS = 512  # with fewer, blocks of many items are faster than blocks of few keys
ROWS = 192  # largest number of rows of a block that reads only some keys
DENSE = 0.8  # share of queries × keys: if more is read, reading all is faster

# Scores of a block, of which a step holds several copies: 8 MB each in float32 on the CPU, where
# more would not be faster; on other devices enough to keep a GPU busy.
BLOCK_SCORES = {"cpu": 2**21, "other": 2**24}
KEPT = 2  # blocks on the CPU, in numbers of scores, whose graphs are kept for the backward


def in_blocks(
    inputs: Inputs, function: BlockFunction, *, skips: bool = False
) -> tuple[Tensor, ...]:
    """Apply the function to each block and concatenate the results.

    Args:
        skips: whether a block is given only the keys that its queries may see by the mask's plan;
            otherwise it is given all keys.
    """
    exact = in_high_precision(inputs)
    with no_autocast(inputs.query):
        key, value = exact.repeated_heads()
        exact = replace(exact, key=key, value=value).as_scaled_dot()
        sizes = _block_sizes(exact) if _can_recompute(exact) else None
        reads: Reads = {}
        if sizes is not None and skips and exact.mask is not None:
            sizes, reads = _reads(exact, exact.mask, sizes)
        if sizes is None or (not reads and len(sizes[0]) == len(sizes[1]) == 1):
            return function(exact, _allowed(exact, (0, 0), exact))
        tensors = _tensors(exact).values()
        if (
            torch.compiler.is_compiling()
            # the tensors of a user's score are not known
            or type(exact.score) not in (ScaledDot, Additive)
            or has_tangent(tensors)
        ):
            return _checkpointed(function, exact, sizes, reads)
        # Hooks on saved tensors, as of torch's checkpoints, would be called for each block.
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        keeps = exact.query.is_cpu and torch.is_grad_enabled() and not is_hooked
        room = KEPT * BLOCK_SCORES["cpu"] if keeps else 0
        return _Recomputed.apply(function, exact, sizes, reads, room, *tensors)


def _can_recompute(inputs: Inputs) -> bool:
    """Return whether blocks are possible: sizes are known and not 0, in autograd's own mode."""
    return not (
        torch.compiler.is_exporting()
        or inputs.is_empty
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


class _Recomputed(torch.autograd.Function):
    """The blocks, each of which writes its rows of the output and adds to the gradients in place.

    A checkpoint of torch for each block would allocate parts of gradients between the large tensors
    of the blocks and so fragment the memory, a third of which could not be used again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: BlockFunction,
        inputs: Inputs,
        sizes: Sizes,
        reads: Reads,
        room: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.check_mask = unwritten(inputs.mask, {})  # autograd checks the tensors
        ctx.function, ctx.sizes, ctx.reads = function, sizes, reads
        ctx.inputs = _with(inputs, dict.fromkeys(_tensors(inputs)))
        ctx.names = tuple(_tensors(inputs))
        ctx.wanted = list(compress(ctx.names, ctx.needs_input_grad[5:]))
        ctx.graphs = {}  # of the last blocks, so that the others draw the first random numbers
        ctx.random_state = _random_state(inputs)
        outputs: tuple[Tensor, ...] = ()
        blocks = list(_blocks(inputs, sizes))
        counts = [_num_scores(block, reads.get(start)) for start, block in blocks]
        num_left = sum(counts)
        for (start, block), count in zip(blocks, counts, strict=True):
            read = _read(block, start, inputs, reads)
            if num_left <= room:
                graph = _graph(function, *read, ctx.wanted)
                ctx.graphs[start], results = graph, graph[1]
            else:
                results = function(*read)
            num_left -= count
            if not outputs:
                batch, _, num_queries, _ = inputs.query.shape
                outputs = tuple(
                    result.new_empty(batch, result.shape[1], num_queries, *result.shape[3:])
                    for result in results
                )
            for output, result in zip(outputs, results, strict=True):
                _place(output, start, result).copy_(result)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.check_mask()
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        wanted = ctx.wanted
        inputs = _with(ctx.inputs, tensors)
        with no_autocast(inputs.query), _replayed(ctx.random_state):
            if torch.is_grad_enabled():  # create_graph
                outputs = _checkpointed(ctx.function, inputs, ctx.sizes, ctx.reads)
                found = _derivatives(outputs, tensors, wanted, gradients, create_graph=True)
            else:
                found = _sums(
                    ctx.function, inputs, ctx.sizes, ctx.reads, wanted, gradients, ctx.graphs
                )
        return None, None, None, None, None, *(found.get(name) for name in ctx.names)


def _sums(
    function: BlockFunction,
    inputs: Inputs,
    sizes: Sizes,
    reads: Reads,
    wanted: list[str],
    gradients: tuple[Tensor | None, ...],
    graphs: dict[tuple[int, int], Graph],
) -> dict[str, Tensor]:
    """Sum the gradients of the wanted tensors over the blocks; a block's graph is taken from those
    that were kept, or computed again."""
    tensors = _tensors(inputs)
    totals = {name: torch.zeros_like(tensors[name]) for name in wanted}
    places = _blocks(_with(inputs, tensors | totals), sizes)
    for (start, block), (_, place) in zip(_blocks(inputs, sizes), places, strict=True):
        graph = graphs.pop(start, None)
        cut, outputs = graph or _graph(function, *_read(block, start, inputs, reads), wanted)
        output_gradients = [
            None if gradient is None else _place(gradient, start, output)
            for gradient, output in zip(gradients, outputs, strict=True)
        ]
        found = _derivatives(outputs, cut, wanted, output_gradients)
        for name, total in _tensors(place).items():
            if name in found:
                _add(name, total, found[name], reads.get(start))
    return totals


def _graph(
    function: BlockFunction, block: Inputs, allowed: Tensor | None, wanted: list[str]
) -> Graph:
    """Apply the function to a block, with a graph that ends at the wanted tensors of the block."""
    cut = {name: tensor.detach() for name, tensor in _tensors(block).items()}
    for name in wanted:
        cut[name].requires_grad_()
    with torch.enable_grad():
        return cut, function(_with(block, cut), allowed)


def _derivatives(
    outputs: Sequence[Tensor],
    tensors: dict[str, Tensor],
    wanted: list[str],
    gradients: Sequence[Tensor | None],
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Compute the gradients by the wanted tensors from those by the outputs; zeros are left out."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if not pairs:
        return {}
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        [tensors[name] for name in wanted],
        [gradient for _, gradient in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    named = zip(wanted, found, strict=True)
    return {name: gradient for name, gradient in named if gradient is not None}


def _checkpointed(
    function: BlockFunction, inputs: Inputs, sizes: Sizes, reads: Reads
) -> tuple[Tensor, ...]:
    """Apply the function to each block by torch's checkpoints, which find every tensor that the
    function reads, and whose gradients have derivatives."""
    draws = inputs.dropout_p > 0 or inputs.normalizer.draws
    check = unwritten(inputs.mask, _tensors(inputs))

    def of_block(block: Inputs, start: tuple[int, int]) -> tuple[Tensor, ...]:
        check()
        return function(*_read(block, start, inputs, reads))

    results = [
        checkpoint(of_block, block, start, use_reentrant=False, preserve_rng_state=draws)
        if torch.is_grad_enabled()
        else of_block(block, start)
        for start, block in _blocks(inputs, sizes)
    ]
    per_item = len(sizes[1])
    items = (
        _join(results[first : first + per_item], dim=2)
        for first in range(0, len(results), per_item)
    )
    return _join(items, dim=0)


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of the inputs and of the score, which may have gradients, by name."""
    named = {name: getattr(inputs, name) for name in ("query", "key", "value", "bias", "sink")}
    named |= vars(inputs.score)
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def _with(inputs: Inputs, tensors: dict[str, Any]) -> Inputs:
    """Return the inputs with these tensors in the place of `_tensors`."""
    in_score = {name: value for name, value in tensors.items() if name in vars(inputs.score)}
    others = {name: value for name, value in tensors.items() if name not in in_score}
    return replace(inputs, **others, score=replace(inputs.score, **in_score))


def _random_state(inputs: Inputs) -> tuple[Any, ...] | None:
    """Return the random state that `_replayed` restores; None if no random numbers are drawn."""
    if inputs.dropout_p == 0 and not inputs.normalizer.draws:
        return None
    return inputs.query.device.type, torch.get_rng_state(), *get_device_states(inputs.query)


@contextmanager
def nothing_drawn_on_error(inputs: Inputs) -> Iterator[None]:
    """Restore the random state if the block, which may draw random numbers, raises."""
    on_gpu = inputs.query.device.type == "cuda"
    # the random state cannot be read while a CUDA graph is captured
    has_state = not on_gpu or (
        torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    )
    state = _random_state(inputs) if has_state else None
    try:
        yield
    except BaseException:
        if state is not None:
            device_type, cpu_state, devices, device_states = state
            torch.set_rng_state(cpu_state)
            set_device_states(devices, device_states, device_type=device_type)
        raise


@contextmanager
def _replayed(state: tuple[Any, ...] | None) -> Iterator[None]:
    """Draw in the block the random numbers that follow this state."""
    if state is None:
        yield
        return
    device_type, cpu_state, devices, device_states = state
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.set_rng_state(cpu_state)
        set_device_states(devices, device_states, device_type=device_type)
        yield


def _allowed(block: Inputs, start: tuple[int, int], whole: Inputs) -> Tensor | None:
    """Return the dense mask of a block whose first batch item and row are `start`."""
    if whole.mask is None:
        return None
    batch, num_heads, num_rows, _ = block.query.shape
    device, sizes = block.query.device, (whole.num_queries, whole.num_keys)
    if (batch, num_rows) == (whole.query.shape[0], whole.num_queries):
        return whole.mask.dense(*sizes, device)
    item, row = start
    items = torch.arange(item, item + batch, device=device)
    rows = torch.arange(row, row + num_rows, device=device)
    return whole.mask.select(items, torch.arange(num_heads, device=device), rows, *sizes)


def _reads(inputs: Inputs, mask: Mask, sizes: Sizes) -> tuple[Sizes, Reads]:
    """Return the sizes of blocks, smaller ones if the mask leaves much out, and their keys."""
    device = inputs.query.device
    if inputs.num_keys < LEAST_KEYS or not is_read_quickly(mask, device):
        return sizes, {}
    items, rows = max(sizes[0]), min(ROWS, max(sizes[1]))
    key = (inputs.query.shape[0], inputs.num_queries, inputs.num_keys, items, rows)
    found = kept(mask, "_reads", key, device, partial(_reads_of, mask, *key))
    return found if found[1] else (sizes, {})


def _reads_of(
    mask: Mask, batch: int, num_queries: int, num_keys: int, items: int, size: int
) -> tuple[Sizes, Reads]:
    blocks = query_blocks(mask, num_queries, num_keys, size)
    plan = mask.plan(blocks).simplified()
    if plan.shape[0] > 1:
        items = 1
    runs = [*plan.rows()]
    rows = np.arange(len(runs)).reshape(plan.shape)
    reads = {
        (item, start): _union([runs[row] for row in rows[min(item, len(rows) - 1), :, number]])
        for item in range(0, batch, items)
        for number, start in enumerate(blocks.start.tolist())
    }
    num_rows = (blocks.stop - blocks.start).tolist()
    num_read = sum(
        size * reads[item, start].num_keys
        for item in range(0, batch, items)
        for start, size in zip(blocks.start.tolist(), num_rows, strict=True)
    )
    if num_read > DENSE * -(-batch // items) * num_queries * num_keys:
        reads = {}
    return (_divided(batch, items), num_rows), reads


def _union(rows: list[list[tuple[int, int, int]]]) -> Read:
    """Return the keys of all runs of some rows of a plan."""
    runs: list[list[int]] = []
    for start, end, _ in sorted(run for row in rows for run in row):
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    if not runs:
        return Read(((0, 1),), True)  # one key, which the mask hides
    is_masked = len(rows) > 1 or any(kind == SOME for *_, kind in rows[0])
    return Read(tuple((start, end - start) for start, end in runs), is_masked)


def _read(
    block: Inputs, start: tuple[int, int], whole: Inputs, reads: Reads
) -> tuple[Inputs, Tensor | None]:
    """Return the block with the keys that it reads, and their mask."""
    read = reads.get(start)
    if read is None:
        return block, _allowed(block, start, whole)
    bias = block.bias
    if bias is not None and bias.shape[3] > 1:
        bias = read.of(bias, 3)
    key, value = read.of(block.key, 2), read.of(block.value, 2)
    block = replace(block, key=key, value=value, bias=bias)
    mask, device = whole.mask, whole.query.device
    if mask is None or not read.is_masked:
        return block, None
    item, row = start
    batch, num_heads, num_rows, _ = block.query.shape
    items, heads = (
        torch.arange(1 if number == 1 else size, device=device)
        for number, size in zip(mask.leading, (batch, num_heads), strict=True)
    )
    if mask.leading[0] > 1:
        items = items + item
    rows = torch.arange(row, row + num_rows, device=device)
    keys = torch.cat([torch.arange(a, a + size, device=device) for a, size in read.runs])
    places = items[:, None, None, None], heads[:, None, None], rows[:, None], keys
    return block, as_4d(mask.allows(*places, whole.num_queries, whole.num_keys))


def _num_scores(block: Inputs, read: Read | None) -> int:
    return block.query.shape[:3].numel() * (block.num_keys if read is None else read.num_keys)


def _add(name: str, total: Tensor, found: Tensor, read: Read | None) -> None:
    """Add the gradients of the keys that a block read to those of all keys."""
    dim = {"key": 2, "value": 2, "bias": 3}.get(name)
    if read is None or dim is None or total.shape[dim] == found.shape[dim]:
        total.add_(found)
        return
    parts = found.split([size for _, size in read.runs], dim)
    for (start, size), part in zip(read.runs, parts, strict=True):
        total.narrow(dim, start, size).add_(part)


def _place(whole: Tensor, start: tuple[int, int], block: Tensor) -> Tensor:
    """Return the view of an output in which a block lies."""
    item, row = start
    return whole[item : item + len(block), :, row : row + block.shape[2]]


def _blocks(inputs: Inputs, sizes: Sizes) -> Iterator[tuple[tuple[int, int], Inputs]]:
    """Yield ((first batch item, first row), block) of each block."""
    items, rows = sizes
    first_items, first_rows = (accumulate(counts[:-1], initial=0) for counts in sizes)
    starts = product(first_items, first_rows)
    for item in _parts(inputs, ("query", "key", "value", "bias"), items, 0):
        for block in _parts(item, ("query", "bias"), rows, 2):
            yield next(starts), block


def _parts(inputs: Inputs, names: Sequence[str], sizes: list[int], dim: int) -> list[Inputs]:
    """Split the named tensors of the inputs along a dimension, except those that broadcast."""
    split: list[Sequence[Any]] = []
    for name in names:
        tensor = getattr(inputs, name)
        if tensor is None or tensor.shape[dim] == 1:
            split.append([tensor] * len(sizes))
        else:
            # split rather than sliced: the gradient is then one concatenation
            split.append(tensor.split(sizes, dim))
    return [
        replace(inputs, **dict(zip(names, tensors, strict=True)))
        for tensors in zip(*split, strict=True)
    ]


def _join(parts: Any, dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True))


def _block_sizes(inputs: Inputs) -> Sizes:
    """Return the numbers of batch items and query rows of blocks that read all keys."""
    batch, num_heads, num_queries, _ = inputs.query.shape
    most = BLOCK_SCORES["cpu" if inputs.query.is_cpu else "other"]
    if torch.compiler.is_compiling():
        most = max(most, batch * num_heads * num_queries * inputs.num_keys // TRACED_PARTS)
    rows = min(num_queries, max(1, most // (num_heads * inputs.num_keys)))
    items = min(batch, max(1, most // (num_heads * inputs.num_keys * rows)))
    return _divided(batch, items), _divided(num_queries, rows)


def _divided(total: int, size: int) -> list[int]:
    """Divide the total into parts of this size and a rest."""
    return [size] * (total // size) + [total % size] * (total % size > 0)
