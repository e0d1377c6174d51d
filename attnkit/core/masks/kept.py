"""Caches: results made from a mask, or from a tensor of edges, which all layers given it share;
cached properties."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from attnkit.core.masks.base import Mask
from attnkit.core.operators.cpu import PLAIN

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Kept(Generic[Made]):
    """A cached value, with its key and the state of the tensors from which it was made."""

    key: tuple
    tensors: tuple[Tensor | tuple, ...]
    value: Made
    written: Tensor
    """An empty tensor, the formal output of `_check_unchanged`."""

    def is_of(self, key: tuple, tensors: Sequence[Tensor]) -> bool:
        """Return whether the value is still valid for this key and these tensors."""
        return self.key == key and self.is_unchanged(tensors)

    def is_unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors are equal to those from which the value was made."""
        return len(self.tensors) == len(tensors) and all(map(_is_as_it_was, tensors, self.tensors))

    def __reduce__(self) -> tuple:
        return tuple, ()  # a copy of the mask holds an empty tuple in its place


def kept(
    mask: Mask,
    name: str,
    key: tuple,
    device: torch.device,
    make: Callable[[], Made],
    *,
    in_programs: bool = False,
    is_private: bool = False,
) -> Made:
    """Return `make()`, cached with the mask object for this device.

    The last value of each name is kept as an attribute of the mask object; copies of the mask start
    without it. It is made again for another key, and after a tensor of the mask has changed. On the
    CPU the numbers are compared with a copy, so that every write is noticed, by torch, NumPy or
    another process; for a million edges the comparison takes 1.5 ms and sorting them 60. On a GPU
    that would mean waiting for it, so only what torch counts is compared: writes by operators are
    noticed, writes through `.data` or by another library are not.

    Args:
        in_programs: whether a compiled, traced or captured program may read a value that was made
            before. On the CPU compiled code raises RuntimeError if the numbers have changed since.
        is_private: whether nobody else can write to the mask's tensors; they are then not compared.
    """
    there = vars(mask).get(name)
    found: Kept[Made] | None = there if isinstance(there, Kept) else None
    if not has_values(device):
        if not in_programs or found is None or found.key != (*key, device):
            return make()
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            for tensor, then in zip(pytree.tree_leaves(mask), found.tensors, strict=False):
                if isinstance(tensor, Tensor) and isinstance(then, Tensor):
                    _check_unchanged(tensor, then, found.written)
        return found.value
    tensors = [] if is_private else tensors_of(mask)
    if tensors is None:
        return make()
    key = *key, device
    if found is None or not found.is_of(key, tensors):
        with torch.inference_mode(False):  # training may read the value later
            others = [other for other in [*vars(mask).values()] if isinstance(other, Kept)]
            same = (other.tensors for other in others if other.is_unchanged(tensors))
            as_they_are = next(same, None) or tuple(map(as_it_is, tensors))  # share one copy
            found = Kept(key, as_they_are, make(), torch.empty(0))
        leaves = (leaf for leaf in pytree.tree_leaves(found.value) if isinstance(leaf, Tensor))
        if all(type(leaf) is Tensor for leaf in leaves):  # fake tensors must not be kept
            vars(mask)[name] = found
    return found.value


@torch.library.custom_op("attnkit::check_unchanged", mutates_args=("written",))
def _check_unchanged(tensor: Tensor, then: Tensor, written: Tensor) -> None:
    """Raise RuntimeError if the numbers have changed. The operator is declared to write to
    `written`, so that a compiled program does not remove it."""
    if not torch.equal(tensor, then):
        raise RuntimeError(
            "mask: its numbers were written to after it was first used, and compiled code reads "
            "what was made of them then; build another mask, or call once uncompiled"
        )


@_check_unchanged.register_fake
def _(tensor, then, written):
    return None


def kept_mask(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the dense mask, broadcastable to [batch, heads, queries, keys], and keep it: booleans,
    or in a floating-point dtype 0 and −∞, to be added to the scores."""

    def make() -> Tensor:
        allowed = mask.dense(num_queries, num_keys, device)
        if dtype == torch.bool:
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)

    return kept(mask, "_dense", (num_queries, num_keys, dtype), device, make)


def has_values(device: torch.device) -> bool:
    """Return whether tensors have values that may be read and kept; not so while a program is
    compiled, traced or captured, which will run again with other values."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def is_read_quickly(mask: Mask, device: torch.device) -> bool:
    """Return whether the mask can be read and kept on this device without waiting for a GPU."""
    leaves = pytree.tree_leaves(mask)  # a mask class of the user's is a leaf itself
    is_there = (leaf.is_cpu if isinstance(leaf, Tensor) else type(leaf) is int for leaf in leaves)
    return has_values(device) and all(is_there)


def tensors_of(mask: Mask) -> list[Tensor] | None:
    """Return the mask's tensors; None if they or changes of them cannot be known."""
    leaves = pytree.tree_leaves(mask)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # a mask class of the user's may hold anything, and so may subclasses of tensors
    if any(isinstance(leaf, Mask) for leaf in leaves):
        return None
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    if any(not tensor.is_cpu and tensor.is_inference() for tensor in tensors):
        return None  # inference tensors do not count writes
    return tensors


def tensors_within(value: object) -> list[Tensor]:
    """Return the tensors in a mask, including the tensor attributes of mask classes of the user's,
    alone or in a combination."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mask):
            names = [*vars(leaf), *getattr(leaf, "__slots__", ())]
            found += tensors_within([getattr(leaf, name, None) for name in names])
    return found


def as_it_is(tensor: Tensor) -> Tensor | tuple:
    """Return a snapshot of the tensor, by which a later change can be noticed."""
    if tensor.is_cpu:
        return tensor.detach().clone()
    return as_counted(tensor)


def as_counted(tensor: Tensor) -> tuple:
    """Return the version, address, shape, strides and dtype of a tensor, without its numbers."""
    version = None if tensor.is_inference() else tensor._version
    place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return version, *place, tensor.dtype


def _is_as_it_was(tensor: Tensor, then: Tensor | tuple) -> bool:
    if isinstance(then, Tensor):
        return tensor.is_cpu and tensor.dtype == then.dtype and _equal(tensor, then)
    return not tensor.is_cpu and as_it_is(tensor) == then


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """Return `torch.equal`, but compare booleans eight at a time, where torch compares each."""
    if tensor.dtype == torch.bool and tensor.is_contiguous() and tensor.numel() % 8 == 0:
        if tensor.shape != other.shape:
            return False
        tensor, other = (t.contiguous().view(-1).view(torch.int64) for t in (tensor, other))
    return torch.equal(tensor, other)


MOST = 64  # tensors in the cache: it must not multiply the memory of a long list of graphs
_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For each tensor the last `Kept` object that was made from it. The object does not refer to the
tensor, so that both are freed together. There is no lock: two threads may both sort the edges, with
equal results, and a lock that is held while a process forks would never be released in the
child."""


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


def remembered_of(
    tensors: Sequence[Tensor | None], key: tuple[Hashable, ...], make: Callable[[], Made]
) -> Made:
    """Return `make()`, cached as long as the first of these tensors lives.

    The conditions are those of `remembered_edges`; the result must hold copies of the tensors only.

    key: what else the result depends on.
    """
    parts, kinds = [], []
    for tensor in tensors:
        memory = memory_of(tensor)
        if tensor is None or memory is None:
            return make()
        parts += memory
        kinds.append((tensor.layout, tensor.shape, stream_of(tensor)))
    if not parts:
        return make()
    # kept alive, so that no other tensor gets the address of one that was freed
    held = [part.detach() for part in parts if not part.is_cpu]
    made = remembered(tensors[0], parts, (*key, *kinds), lambda: (make(), held))  # type: ignore[arg-type]
    return made[0]


def memory_of(tensor: Tensor | None) -> list[Tensor] | None:
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


def stream_of(tensor: Tensor) -> int | None:
    """Return the current stream of the tensor's GPU; None on other devices."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


_PLACES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_coo: ("_indices",),
}


class cached(Generic[Made]):
    """A `functools.cached_property` that torch.compile can trace.

    Compiled code computes it each time, unless it was cached before. A value that is computed in
    inference mode can be used in training, too.
    """

    def __init__(self, function: Callable[[Any], Made]) -> None:
        self.func, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached[Made]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> Made: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Compute and keep the value; Python looks up the instance's own attribute first."""
        if instance is None:
            return self
        if torch.compiler.is_compiling():
            return self.func(instance)
        with torch.inference_mode(False):
            value = vars(instance)[self.name] = self.func(instance)
        return value
