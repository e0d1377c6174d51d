"""Regions that compute in the precision they are given, or to the same bits in any batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.contexts import Opened, uncompiled

# A list, since torch.compile of torch 2.11 cannot ask torch.amp.is_autocast_available.
WITHOUT_AUTOCAST = {"fpga", "lazy", "meta", "mkldnn", "vulkan"}


def no_autocast(like: Tensor) -> AbstractContextManager:
    """A context without autocast on the device of a tensor; some devices, such as meta, have
    none."""
    device_type = like.device.type
    if device_type in WITHOUT_AUTOCAST:
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in another dtype, where finite stays finite: a −1e9 must not forbid in float16."""
    if bias.dtype == dtype:
        return bias
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)


EXACT: Opened[bool] = Opened("exact")
ALIGNED = 64  # bytes: vectors of processors are no longer


@contextmanager
def exact() -> Iterator[None]:
    """In the block attention of an item gives the same bits whatever is computed beside it.

        with attnkit.exact():
            output = model(batch)
        output.sum().backward()    # as exact as the forward; it need not be in the block

    The output of `attend`, and its gradients by query, key and value, are to the last bit the same

    - for an item alone and for the same item among others, at any place of any batch;
    - for a sequence alone, padded (`Padding`: the rows of its tokens) and packed with others
      (`Packed`), also with `Causal` or `Window` beside it, which then count within the sequence;
    - with any number of threads, of `torch.set_num_threads` or of `OMP_NUM_THREADS`;
    - at any address, and in any order of strides.

    Where activations are checkpointed, the backward computes the forward again: then it must be in
    the block, too.

    Beside `Padding`, of as many queries as keys, the queries that stand where keys are padding are
    padding too. The real keys of an item stand beside each other, at the left, the right or between
    padding. Where there are other numbers of queries, as in cross-attention, all are real.

    Each sequence is computed by itself, in one thread, from copies whose layout is always the same,
    in float32 (float64 if the inputs are). Sequences and blocks of queries are divided among
    threads. What it costs is in docs/benchmarks.md. The kernels are "block_sparse", and
    "edges_numba" for `Edges`, where a graph has the same bits among other graphs, if its edges keep
    their order; "auto" takes these, all others refuse.

    Not promised are the same bits

    - for what else a model computes: linear layers, norms and convolutions are torch's, whose
      matrix products may depend on the batch and on the threads. A model is as exact as these are;
    - on other processors, other versions of torch, or outside of the block;
    - for gradients that sum over items, as those of parameters.

    Served are, on a CPU, softmax with "scaled_dot" or "dot" (over `Edges` also `Additive`), any
    mask that is the same for all items, `Padding`, `Packed`, and a bias that needs no gradient.
    Refused are dropout, whose random numbers depend on the batch, sinks, other scores and
    normalizers, edge features, and tensors on a GPU, where none of this was tested. Compiled
    modules run uncompiled in the block. Blocks may be nested. Other threads are not reached, but
    those that run in this context, as of `asyncio.to_thread`.

    Raises:
        UnsupportedError: by `attend` in the block, for what cannot be computed so.
        RuntimeError: the block is opened in compiled code.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("attnkit.exact: cannot be opened in compiled code; open it around that")
    with EXACT.opened(True), uncompiled():
        yield


def laid_out(tensor: Tensor) -> Tensor:
    """The numbers [batch, heads, tokens, channels] one after the other, in the precision that sums
    are computed in, each token at an address that a vector may have: what matrix products do at
    other addresses, and of other strides, may end in other bits."""
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
