"""Any function of attention's inputs, a block of batch items and query rows at a time.

Forward and backward hold the inputs, the output, their gradients and one block: the backward
calls the function again for each block (Chen et al., Training Deep Nets with Sublinear Memory Cost,
2016), with the same random numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import TRACED_PARTS
from attnkit.core.operators.modes import has_tangent
from attnkit.core.precision import no_autocast
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import ScaledDot

BlockFunction = Callable[[Inputs, "Tensor | None"], tuple[Tensor, ...]]
"""From the inputs of some batch items and query rows, and their mask, to tensors
[batch, heads, rows, ...]."""

# Scores computed at once, of which a step holds several copies: 8 MB each in float32 on the CPU,
# more would be no faster; elsewhere enough to keep a GPU busy.
BLOCK_SCORES = {"cpu": 2**21, "other": 2**24}


def in_blocks(inputs: Inputs, function: BlockFunction) -> tuple[Tensor, ...]:
    """What the function gives for each block, concatenated."""
    exact = in_high_precision(inputs)
    with no_autocast(inputs.query):
        key, value = exact.repeated_heads()
        exact = replace(exact, key=key, value=value).as_scaled_dot()
        sizes = _block_sizes(exact) if _can_recompute(exact) else None
        if sizes is None or sizes == (exact.query.shape[0], exact.num_queries):
            return function(exact, _allowed(exact, (0, 0), exact))
        tensors = _tensors(exact).values()
        if (
            torch.compiler.is_compiling()
            # of a score of the user's, whose tensors are not known
            or type(exact.score) not in (ScaledDot, Additive)
            or has_tangent(tensors)
        ):
            return _checkpointed(function, exact, sizes)
        return _Recomputed.apply(function, exact, sizes, *tensors)


def _can_recompute(inputs: Inputs) -> bool:
    """Whether there are blocks: sizes that are known and not 0, and the backward of autograd."""
    return not (
        torch.compiler.is_exporting()
        or inputs.is_empty
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


class _Recomputed(torch.autograd.Function):
    """Each block writes its rows of the output, and adds to the gradients, where they will stay.

    A checkpoint of torch for each block would leave parts of gradients between the large tensors
    of the blocks, so that a third of the memory they were taken from cannot be used again.
    """

    @staticmethod
    def forward(
        ctx: Any, function: BlockFunction, inputs: Inputs, sizes: tuple[int, int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.sizes = function, sizes
        ctx.inputs = _with(inputs, dict.fromkeys(_tensors(inputs)))
        ctx.names = tuple(_tensors(inputs))
        ctx.random_state = _random_state(inputs)
        outputs: tuple[Tensor, ...] = ()
        for start, block in _blocks(inputs, sizes):
            results = function(block, _allowed(block, start, inputs))
            outputs = outputs or tuple(_as_large_as(inputs.query, result) for result in results)
            for output, result in zip(outputs, results, strict=True):
                _place(output, start, result).copy_(result)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        wanted = [
            name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed
        ]
        inputs = _with(ctx.inputs, tensors)
        with no_autocast(inputs.query), _replayed(ctx.random_state):
            if torch.is_grad_enabled():  # create_graph
                outputs = _checkpointed(ctx.function, inputs, ctx.sizes)
                found = _derivatives(outputs, tensors, wanted, gradients, create_graph=True)
            else:
                found = _sums(ctx.function, inputs, ctx.sizes, wanted, gradients)
        return None, None, None, *(found.get(name) for name in ctx.names)


def _sums(
    function: BlockFunction,
    inputs: Inputs,
    sizes: tuple[int, int],
    wanted: list[str],
    gradients: tuple[Tensor | None, ...],
) -> dict[str, Tensor]:
    """The gradients of the wanted tensors, each block's added to those before."""
    tensors = _tensors(inputs)
    totals = {name: torch.zeros_like(tensors[name]) for name in wanted}
    places = _blocks(_with(inputs, tensors | totals), sizes)
    for (start, block), (_, place) in zip(_blocks(inputs, sizes), places, strict=True):
        cut = {name: tensor.detach() for name, tensor in _tensors(block).items()}
        for name in wanted:
            cut[name].requires_grad_()
        with torch.enable_grad():
            outputs = function(_with(block, cut), _allowed(block, start, inputs))
        of_outputs = [
            None if gradient is None else _place(gradient, start, output)
            for gradient, output in zip(gradients, outputs, strict=True)
        ]
        found = _derivatives(outputs, cut, wanted, of_outputs)
        for name, total in _tensors(place).items():
            if name in found:
                total.add_(found[name])
    return totals


def _derivatives(
    outputs: Sequence[Tensor],
    tensors: dict[str, Tensor],
    wanted: list[str],
    gradients: Sequence[Tensor | None],
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """By the wanted tensors, from those by the outputs; without the ones that are 0."""
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
    function: BlockFunction, inputs: Inputs, sizes: tuple[int, int]
) -> tuple[Tensor, ...]:
    """The same by torch's checkpoints, which find every tensor that the function reads, and whose
    gradients have derivatives."""
    draws = inputs.dropout_p > 0 or inputs.normalizer.draws

    def of_block(block: Inputs, start: tuple[int, int]) -> tuple[Tensor, ...]:
        return function(block, _allowed(block, start, inputs))

    results = [
        checkpoint(of_block, block, start, use_reentrant=False, preserve_rng_state=draws)
        if torch.is_grad_enabled()
        else of_block(block, start)
        for start, block in _blocks(inputs, sizes)
    ]
    per_item = -(-inputs.num_queries // sizes[1])
    items = (
        _join(results[first : first + per_item], dim=2)
        for first in range(0, len(results), per_item)
    )
    return _join(items, dim=0)


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    """What a gradient may be asked of: the inputs' own tensors and their score's, by name."""
    named = {name: getattr(inputs, name) for name in ("query", "key", "value", "bias")}
    named |= vars(inputs.score)
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def _with(inputs: Inputs, tensors: dict[str, Any]) -> Inputs:
    """The inputs with others in the place of `_tensors`."""
    of_score = {name: value for name, value in tensors.items() if name in vars(inputs.score)}
    others = {name: value for name, value in tensors.items() if name not in of_score}
    return replace(inputs, **others, score=replace(inputs.score, **of_score))


def _random_state(inputs: Inputs) -> tuple[Any, ...] | None:
    """The random numbers' state that `_replayed` goes back to; None where none are drawn."""
    if inputs.dropout_p == 0 and not inputs.normalizer.draws:
        return None
    return inputs.query.device.type, torch.get_rng_state(), *get_device_states(inputs.query)


@contextmanager
def nothing_drawn_on_error(inputs: Inputs) -> Iterator[None]:
    """In the block random numbers may be drawn; if it raises, their state is as it was before."""
    on_gpu = inputs.query.device.type == "cuda"
    # the state of a graph that is being captured cannot be read
    has_state = not on_gpu or (
        torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    )
    state = _random_state(inputs) if has_state else None
    try:
        yield
    except BaseException:
        if state is not None:
            device_type, of_cpu, devices, of_devices = state
            torch.set_rng_state(of_cpu)
            set_device_states(devices, of_devices, device_type=device_type)
        raise


@contextmanager
def _replayed(state: tuple[Any, ...] | None) -> Iterator[None]:
    """In the block random numbers are those that were drawn from this state on."""
    if state is None:
        yield
        return
    device_type, of_cpu, devices, of_devices = state
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.set_rng_state(of_cpu)
        set_device_states(devices, of_devices, device_type=device_type)
        yield


def _allowed(block: Inputs, start: tuple[int, int], whole: Inputs) -> Tensor | None:
    """The mask of a block whose first batch item and row are `start`."""
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


def _as_large_as(query: Tensor, block: Tensor) -> Tensor:
    """Memory for all rows of what a block gave some of."""
    (batch, _, rows, _), (_, num_heads, _, *sizes) = query.shape, block.shape
    return block.new_empty(batch, num_heads, rows, *sizes)


def _place(whole: Tensor, start: tuple[int, int], block: Tensor) -> Tensor:
    """Where a block of the outputs lies in them."""
    item, row = start
    return whole[item : item + len(block), :, row : row + block.shape[2]]


def _blocks(inputs: Inputs, sizes: tuple[int, int]) -> Iterator[tuple[tuple[int, int], Inputs]]:
    """The blocks, each behind its first batch item and row."""
    items, rows = sizes
    for i, item in enumerate(_parts(inputs, ("query", "key", "value", "bias"), items, 0)):
        for j, block in enumerate(_parts(item, ("query", "bias"), rows, 2)):
            yield (i * items, j * rows), block


def _parts(inputs: Inputs, names: Sequence[str], size: int, dim: int) -> list[Inputs]:
    """The inputs with the named tensors split along a dimension, or as they are where they
    broadcast."""
    length = inputs.query.shape[dim]
    num_parts = -(-length // size)
    split: list[Sequence[Any]] = []
    for name in names:
        tensor = getattr(inputs, name)
        if tensor is None or tensor.shape[dim] == 1:
            split.append([tensor] * num_parts)
        else:
            # split rather than sliced: the gradient is then one concatenation
            split.append(tensor.split(size, dim))
    return [
        replace(inputs, **dict(zip(names, tensors, strict=True)))
        for tensors in zip(*split, strict=True)
    ]


def _join(parts: Any, dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True))


def _block_sizes(inputs: Inputs) -> tuple[int, int]:
    """How many batch items and how many query rows make a block."""
    batch, num_heads, num_queries, _ = inputs.query.shape
    most = BLOCK_SCORES["cpu" if inputs.query.is_cpu else "other"]
    if torch.compiler.is_compiling():
        most = max(most, batch * num_heads * num_queries * inputs.num_keys // TRACED_PARTS)
    rows = min(num_queries, max(1, most // (num_heads * inputs.num_keys)))
    items = min(batch, max(1, most // (num_heads * inputs.num_keys * rows)))
    return items, rows
