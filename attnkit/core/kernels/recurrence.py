"""Recurrences over long sequences in segments, which pass on a state; the backward recomputes them.

Attention with a memory of fixed size uses them: the memory is the state, and within a segment
chunks of tokens become batched matrix products.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnkit.core.kernels.base import TRACED_PARTS, are_known

Step = Callable[..., tuple[Any, Tensor]]
"""A function (state, a segment of each tensor) -> (the segment's result, the next state)."""

# Numbers in one tensor of a segment: few enough for the CPU's cache; elsewhere enough to keep a GPU
# busy.
SEGMENT_ELEMENTS = {"cpu": 2**18, "other": 2**24}


def scan(
    step: Step, state: Tensor, tensors: Sequence[Tensor], size: int
) -> tuple[list[Any], Tensor]:
    """Apply the step to segments of `size` tokens; return the results and the last state.

    The tensors are [batch, heads, tokens, ...]. Beside them and the results, memory holds one
    segment and the states between segments: the backward takes each step again (Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016).
    """
    tokens = tensors[0].shape[2]
    if tokens == 0:
        return [], state
    if torch.compiler.is_exporting():  # an unknown number of tokens is one segment
        result, state = step(state, *tensors)
        return [result], state
    # a single segment need not be recomputed: autograd may hold it
    recompute = torch.is_grad_enabled() and tokens > size
    results = []
    # split rather than sliced: the gradient is then one concatenation
    for segment in zip(*(tensor.split(size, dim=2) for tensor in tensors), strict=True):
        if recompute:
            result, state = checkpoint(
                step, state, *segment, use_reentrant=False, preserve_rng_state=False
            )
        else:
            result, state = step(state, *segment)
        results.append(result)
    return results, state


def segment_size(tensor: Tensor, chunk_size: int) -> int:
    """Return the tokens of a segment of tensors like this one, a multiple of the chunk's."""
    if torch.compiler.is_exporting():
        return chunk_size
    batch, heads, tokens, dim = tensor.shape
    most = SEGMENT_ELEMENTS["cpu" if tensor.is_cpu else "other"] // (batch * heads * dim)
    if torch.compiler.is_compiling():
        most = max(most, -(-tokens // TRACED_PARTS))
    return max(1, most // chunk_size) * chunk_size


def size_of_chunk(most: int, tokens: int) -> int:
    """Return the tokens of a chunk; all, if an exported program does not know their number."""
    return min(most, tokens) if are_known(tokens) else tokens


def in_chunks(tensor: Tensor, size: int) -> Tensor:
    """Return [batch, heads, tokens, ...] as [batch, heads, chunks, size, ...], zero-padded."""
    missing = -tensor.shape[2] % size
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 3) + (0, missing))
    return tensor.unflatten(2, (tensor.shape[2] // size, size))
