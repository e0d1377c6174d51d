"""Contexts without autocast, and contexts in which results are bitwise the same in any batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.contexts import Opened, uncompiled

# A list, because torch 2.11 cannot compile torch.amp.is_autocast_available.
WITHOUT_AUTOCAST = {"fpga", "lazy", "meta", "mkldnn", "vulkan"}


def no_autocast(like: Tensor) -> AbstractContextManager:
    """Return a context without autocast on the tensor's device, which may not have autocast."""
    device_type = like.device.type
    if device_type in WITHOUT_AUTOCAST:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias in another dtype; finite numbers stay finite, such as −1e9 in float16."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)


EXACT: Opened[bool] = Opened("exact")
ALIGNED = 64  # bytes: the longest vectors of processors


@contextmanager
def exact() -> Iterator[None]:
    """Make attention in the block bitwise reproducible: an item gives the same bits in any batch.

        with attnkit.exact():
            output = model(batch)
        output.sum().backward()    # as exact as the forward; it need not be in the block

    The output of `attend` and its gradients by query, key and value are the same to the last bit

    - for an item alone and for the same item among others, at any place of any batch;
    - for a sequence alone, padded (`Padding`: the rows of its tokens) and packed with others
      (`Packed`), also combined with `Causal` or `Window`, which then count within the sequence;
    - with any number of threads, set by `torch.set_num_threads` or `OMP_NUM_THREADS`;
    - at any address, and in any order of strides.

    With activation checkpointing the backward computes the forward again, so it must be in the
    block, too.

    With `Padding` and equally many queries and keys, queries at the positions of padded keys count
    as padding, too. The real keys of an item must be contiguous: at the left, at the right, or
    between padding. If the numbers differ, as in cross-attention, all queries count as real.

    Each sequence is computed by itself, in one thread, from copies that always have the same
    layout, in float32 (float64 if the inputs are). Sequences and blocks of queries are divided
    among threads. docs/benchmarks.md has the cost. The kernels are "block_sparse", and for `Edges`
    "edges_numba", which gives a graph the same bits among other graphs if its edges keep their
    order. "auto" takes these; all other kernels refuse.

    The same bits are not promised

    - for the rest of a model: linear layers, norms and convolutions are torch's, whose matrix
      products may depend on the batch and on the threads. A model is as exact as these are;
    - on other processors, with other versions of torch, or outside of the block;
    - for gradients that sum over items, such as those of parameters.

    Supported are, on a CPU, softmax with "scaled_dot" or "dot" (over `Edges` also `Additive`), any
    mask that is the same for all items, `Padding`, `Packed`, and a bias that needs no gradient.
    Refused are dropout, whose random numbers depend on the batch, sinks, other scores and
    normalizers, edge features, and tensors on a GPU, where none of this was tested. Compiled
    modules run uncompiled in the block. Blocks may be nested. Other threads are affected only if
    they run in this context, as with `asyncio.to_thread`.

    Raises:
        UnsupportedError: raised by `attend` in the block, for what cannot be computed exactly.
        RuntimeError: the block is opened in compiled code.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("attnkit.exact: cannot be opened in compiled code; open it around that")
    with EXACT.opened(True), uncompiled():
        yield


def laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor [batch, heads, tokens, channels] contiguous, in the dtype of sums, with each
    token at an aligned address: other strides and addresses can change bits of matrix products."""
    dtype = wide(tensor.dtype)
    at_once = ALIGNED // dtype.itemsize
    tensor, missing = tensor.to(dtype), -tensor.shape[3] % at_once
    if missing:
        tensor = F.pad(tensor, (0, missing))
    _, heads, tokens, channels = tensor.shape
    in_order = heads * tokens * channels, tokens * channels, channels, 1
    if tensor.stride() == in_order and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
