"""What is made once: of a mask, for all the layers that are given it; of any object, a property."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnkit.core.masks.base import Mask

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Kept(Generic[Made]):
    """What was made, and of what: the key, and the tensors as they were."""

    key: tuple
    tensors: tuple[Tensor | tuple, ...]
    value: Made
    written: Tensor
    """Nothing; see `_check_unchanged`."""

    def is_of(self, key: tuple, tensors: Sequence[Tensor]) -> bool:
        """Whether the same would be made again."""
        return self.key == key and self.is_unchanged(tensors)

    def is_unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors as they were."""
        return len(self.tensors) == len(tensors) and all(map(_is_as_it_was, tensors, self.tensors))

    def __reduce__(self) -> tuple:
        return tuple, ()  # in a copy of the mask there is nothing in its place


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
    """What `make()` gives, on this device.

    The last one of each name is kept with the mask object, and goes when that does; copies keep
    nothing. It is made again for another key, and where a tensor of the mask is no longer what it
    was. On the CPU its numbers are compared with a copy, so that it does not matter who wrote them:
    torch, NumPy or another process. Of a million edges that takes 1.5 ms, where they are sorted in
    60. A GPU would have to be waited for, and only what torch counts is compared: what operators
    write is seen there, what is written through `.data` or by another library is not.

    Args:
        in_programs: whether a compiled, traced or captured program reads what was kept when it was
            made. On the CPU compiled code raises RuntimeError where the numbers are others then.
        is_private: whether the mask's tensors are its own, which nobody writes to: they are not
            compared.
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
        with torch.inference_mode(False):  # for training too
            others = [other for other in [*vars(mask).values()] if isinstance(other, Kept)]
            same = (other.tensors for other in others if other.is_unchanged(tensors))
            as_they_are = next(same, None) or tuple(map(as_it_is, tensors))  # a copy for all
            found = Kept(key, as_they_are, make(), torch.empty(0))
        leaves = (leaf for leaf in pytree.tree_leaves(found.value) if isinstance(leaf, Tensor))
        if all(type(leaf) is Tensor for leaf in leaves):  # no fake ones
            vars(mask)[name] = found
    return found.value


@torch.library.custom_op("attnkit::check_unchanged", mutates_args=("written",))
def _check_unchanged(tensor: Tensor, then: Tensor, written: Tensor) -> None:
    """RuntimeError unless the numbers are what they were. It is said to write, so that a compiled
    program does not leave it out."""
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
    """The dense mask, broadcastable to [batch, heads, queries, keys]: booleans, or in a floating
    dtype what is added to the scores, 0 or −∞."""

    def make() -> Tensor:
        allowed = mask.dense(num_queries, num_keys, device)
        if dtype == torch.bool:
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)

    return kept(mask, "_dense", (num_queries, num_keys, dtype), device, make)


def has_values(device: torch.device) -> bool:
    """Whether tensors have values now that may be read and kept: what is computed is no part of a
    program that will run again with others."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def is_read_quickly(mask: Mask, device: torch.device) -> bool:
    """Whether what the mask says may be read and kept on this device, without waiting for a GPU."""
    leaves = pytree.tree_leaves(mask)  # of a mask of the user's, which may hold anything, itself
    is_there = (leaf.is_cpu if isinstance(leaf, Tensor) else type(leaf) is int for leaf in leaves)
    return has_values(device) and all(is_there)


def tensors_of(mask: Mask) -> list[Tensor] | None:
    """The mask's tensors; None where it is not known what it is made of."""
    leaves = pytree.tree_leaves(mask)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # a mask of the user's may hold anything, and so may other kinds of tensors
    if any(isinstance(leaf, Mask) for leaf in leaves):
        return None
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    if any(not tensor.is_cpu and tensor.is_inference() for tensor in tensors):
        return None  # which do not count what is written
    return tensors


def tensors_within(value: object) -> list[Tensor]:
    """The tensors that are known to be in a mask: also those among the attributes of a mask of the
    user's, alone or in a composition."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mask):
            names = [*vars(leaf), *getattr(leaf, "__slots__", ())]
            found += tensors_within([getattr(leaf, name, None) for name in names])
    return found


def as_it_is(tensor: Tensor) -> Tensor | tuple:
    """What tells later whether a tensor is as it is now."""
    if tensor.is_cpu:
        return tensor.detach().clone()
    return as_counted(tensor)


def as_counted(tensor: Tensor) -> tuple:
    """What torch counts and knows of a tensor without looking at its numbers."""
    version = None if tensor.is_inference() else tensor._version
    place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
    return version, *place, tensor.dtype


def _is_as_it_was(tensor: Tensor, then: Tensor | tuple) -> bool:
    if isinstance(then, Tensor):
        return tensor.is_cpu and tensor.dtype == then.dtype and _equal(tensor, then)
    return not tensor.is_cpu and as_it_is(tensor) == then


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """`torch.equal`; of booleans, which it compares one by one, eight at a time."""
    if tensor.dtype == torch.bool and tensor.is_contiguous() and tensor.numel() % 8 == 0:
        if tensor.shape != other.shape:
            return False
        tensor, other = (t.contiguous().view(-1).view(torch.int64) for t in (tensor, other))
    return torch.equal(tensor, other)


class cached(Generic[Made]):
    """`functools.cached_property` that torch.compile can trace: there it is computed each time,
    unless it was kept before. What is kept serves training too, in inference mode as well."""

    def __init__(self, function: Callable[[Any], Made]) -> None:
        self.func, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached[Made]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> Made: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Called unless the instance has an attribute of this name: the value that was kept."""
        if instance is None:
            return self
        if torch.compiler.is_compiling():
            return self.func(instance)
        with torch.inference_mode(False):
            value = vars(instance)[self.name] = self.func(instance)
        return value
