"""Edges that were seen before: what is made of a tensor is made once, for all that are given it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import Kept, Made, as_counted, as_it_is, has_values
from attnkit.core.operators.modes import PLAIN

MOST = 64  # tensors, so that the memory of a long list of graphs is not multiplied
_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of each tensor the last that was made of it, `Kept`. Nothing in it refers to the tensor itself,
so that it goes with the tensor. There is no lock: two threads may both sort, and both are right; a
lock that is held where a process forks would never be free in the child."""


def remembered_edges(edge_index: Tensor, num_targets: int, num_sources: int) -> Edges:
    """`Edges` of this tensor, the same object at every call: its edges are sorted once.

    They are kept as long as the tensor object lives, of the last 64 tensors that came. The kernel
    `edges_numba` keeps 2.6 times its memory, 4.3 times with self-loops; `edges`, which keeps tables
    for each head, up to 25 times. They are made anew for other sizes and where the tensor was
    written to. On a CPU it does not matter who wrote: `Edges` compares the numbers. A GPU would
    have to be waited for. There only what torch counts is compared, the tensor's version and where
    its memory stands: what `.data`, DLPack or another library writes into that memory is not seen.
    On a GPU they are also made anew for another stream, which might read them too early.

    Nothing is remembered within torch.compile, export, tracing, torch.func and the capture of CUDA
    graphs, nor of a tensor that is not the memory of its edges (of 16 bits, of a class of the
    user's), nor of one on a GPU that is sparse or was made in inference mode.

    Raises:
        TypeError, ValueError, IndexError: as `Edges`.
    """
    sizes = num_targets, num_sources
    memory = _memory(edge_index)
    if memory is None:
        return Edges(edge_index, *sizes)
    if edge_index.layout is not torch.strided:  # of which `Edges` makes a copy
        kind = *sizes, edge_index.layout, edge_index.shape
        return remembered(edge_index, memory, kind, lambda: Edges(edge_index, *sizes))
    key = *sizes, _stream(memory[0]), as_counted(memory[0])
    # `Edges` itself compares the numbers, of memory that is held here, so that its address stays
    return remembered(edge_index, [], key, lambda: Edges(memory[0].detach(), *sizes))


def remembered_of(
    tensors: Sequence[Tensor | None], key: tuple[Hashable, ...], make: Callable[[], Made]
) -> Made:
    """What `make()` gives, which is made of copies of these tensors; the same object as long as the
    first of them lives, under the conditions of `remembered_edges`.

    key: what else it is made of.
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
    # held, so that no other tensor gets the address of one that is gone
    held = [part.detach() for part in parts if not part.is_cpu]
    made = remembered(tensors[0], parts, (*key, *kinds), lambda: (make(), held))  # type: ignore[arg-type]
    return made[0]


def _memory(tensor: Tensor | None) -> list[Tensor] | None:
    """The tensors whose numbers are the edges, or types, that a tensor says; None where nothing may
    be remembered of it."""
    if not isinstance(tensor, Tensor) or not has_values(tensor.device):
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    if tensor.layout in _PLACES and tensor.is_cpu:
        return [getattr(tensor, name)() for name in _PLACES[tensor.layout]]
    memory = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    is_told = memory.is_cpu or not (memory.is_meta or memory.is_inference())  # of what is written
    is_itself = memory.layout is torch.strided and type(memory) in PLAIN
    is_index = memory.dtype in (torch.int32, torch.int64)  # others are converted to
    return [memory] if is_told and is_itself and is_index else None


def _stream(tensor: Tensor) -> int | None:
    """The stream of a GPU that work on a tensor would wait in now."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


_PLACES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_coo: ("_indices",),
}


def remembered(
    owner: Tensor, parts: Sequence[Tensor], key: tuple[Hashable, ...], make: Callable[[], Made]
) -> Made:
    """What `make()` gives, kept as long as `owner` lives, to which it must not refer; made again
    for another key, and where a part is no longer what it was."""
    found: Kept[Made] | None = _SEEN.get(owner)
    if found is None or not found.is_of(key, parts):
        with torch.inference_mode(False):  # for training too
            found = Kept(key, tuple(map(as_it_is, parts)), make(), torch.empty(0))
        _SEEN[owner] = found
        for reference in _SEEN.keyrefs()[:-MOST]:  # the oldest
            _SEEN.data.pop(reference, None)
    return found.value
