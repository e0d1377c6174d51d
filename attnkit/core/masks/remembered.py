"""A cache of the `Edges` made from a tensor, so that all layers given that tensor share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import Kept, Made, as_counted, as_it_is, has_values
from attnkit.core.operators.cpu import PLAIN

MOST = 64  # tensors in the cache: it must not multiply the memory of a long list of graphs
_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For each tensor the last `Kept` object that was made from it. The object does not refer to the
tensor, so that both are freed together. There is no lock: two threads may both sort the edges, with
equal results, and a lock that is held while a process forks would never be released in the
child."""


def remembered_edges(edge_index: Tensor, num_targets: int, num_sources: int) -> Edges:
    """Return the `Edges` of this tensor, the same object at every call, so that they are sorted
    once.

    The cache holds the edges of the last 64 tensors, each as long as the tensor object lives. The
    kernel `edges_numba` keeps 2.6 times the memory of the tensor, 4.3 times with self-loops;
    `edges`, which keeps tables for each head, up to 25 times. New edges are made for other sizes
    and after the tensor was written to. On a CPU every write is noticed, since `Edges` compares the
    numbers. On a GPU that would mean waiting for it, so only the tensor's version counter and the
    address of its memory are compared: writes through `.data`, DLPack or another library are not
    noticed. On a GPU new edges are also made for another stream, which might read them too early.

    Nothing is cached inside torch.compile, export, tracing, torch.func and the capture of CUDA
    graphs, nor for a tensor that must be converted first (16-bit integers, subclasses of the
    user's), nor for a tensor on a GPU that is sparse or was made in inference mode.

    Raises:
        TypeError, ValueError, IndexError: as `Edges`.
    """
    sizes = num_targets, num_sources
    memory = _memory(edge_index)
    if memory is None:
        return Edges(edge_index, *sizes)
    if edge_index.layout is not torch.strided:  # `Edges` makes a copy of these
        kind = *sizes, edge_index.layout, edge_index.shape
        return remembered(edge_index, memory, kind, lambda: Edges(edge_index, *sizes))
    key = *sizes, _stream(memory[0]), as_counted(memory[0])
    # `Edges` itself compares the numbers; it holds the memory, so that its address is not reused
    return remembered(edge_index, [], key, lambda: Edges(memory[0].detach(), *sizes))


def remembered_of(
    tensors: Sequence[Tensor | None], key: tuple[Hashable, ...], make: Callable[[], Made]
) -> Made:
    """Return `make()`, cached as long as the first of these tensors lives.

    The conditions are those of `remembered_edges`; the result must hold copies of the tensors only.

    key: what else the result depends on.
    """
    parts, kinds = [], []
    for tensor in tensors:
        memory = _memory(tensor)
        if tensor is None or memory is None:
            return make()
        parts += memory
        kinds.append((tensor.layout, tensor.shape, _stream(tensor)))
    if not parts:
        return make()
    # kept alive, so that no other tensor gets the address of one that was freed
    held = [part.detach() for part in parts if not part.is_cpu]
    made = remembered(tensors[0], parts, (*key, *kinds), lambda: (make(), held))  # type: ignore[arg-type]
    return made[0]


def _memory(tensor: Tensor | None) -> list[Tensor] | None:
    """Return the plain tensors that hold the numbers of a tensor of edges or types; None if nothing
    may be cached for it."""
    if not isinstance(tensor, Tensor) or not has_values(tensor.device):
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    if tensor.layout in _PLACES and tensor.is_cpu:
        return [getattr(tensor, name)() for name in _PLACES[tensor.layout]]
    memory = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    shows_writes = memory.is_cpu or not (memory.is_meta or memory.is_inference())
    is_itself = memory.layout is torch.strided and type(memory) in PLAIN
    is_index = memory.dtype in (torch.int32, torch.int64)  # other dtypes are converted to these
    return [memory] if shows_writes and is_itself and is_index else None


def _stream(tensor: Tensor) -> int | None:
    """Return the current stream of the tensor's GPU; None on other devices."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


_PLACES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_coo: ("_indices",),
}


def remembered(
    owner: Tensor, parts: Sequence[Tensor], key: tuple[Hashable, ...], make: Callable[[], Made]
) -> Made:
    """Return `make()`, cached as long as `owner` lives; the result must not refer to `owner`.

    It is made again for another key, and after one of the parts has changed.
    """
    found: Kept[Made] | None = _SEEN.get(owner)
    if found is None or not found.is_of(key, parts):
        with torch.inference_mode(False):  # training may read the result later
            found = Kept(key, tuple(map(as_it_is, parts)), make(), torch.empty(0))
        _SEEN[owner] = found
        for reference in _SEEN.keyrefs()[:-MOST]:  # the oldest ones
            _SEEN.data.pop(reference, None)
    return found.value
