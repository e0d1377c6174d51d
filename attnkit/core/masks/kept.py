"""What is made once: of a mask, for all the layers that are given it; of any object, a property."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.masks.base import Mask

Made = TypeVar("Made")


def kept(mask: Mask, name: str, key: tuple, device: torch.device, make: Callable[[], Made]) -> Made:
    """What `make()` gives, on this device.

    The last one of each name is kept with the mask object, and goes when that does. It is made
    again for another key, and where an operator of torch wrote into a tensor of the mask in
    between.
    """
    versions = _versions(mask) if _may_keep(device) else None
    if versions is None:
        return make()
    key = *key, device, versions
    found = vars(mask).get(name)
    if found is None or found[0] != key:
        with torch.inference_mode(False):  # for training too
            found = key, make()
        tensors = (leaf for leaf in pytree.tree_leaves(found[1]) if isinstance(leaf, Tensor))
        if all(type(tensor) is Tensor for tensor in tensors):  # no fake ones
            vars(mask)[name] = found
    return found[1]


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


def _may_keep(device: torch.device) -> bool:
    """Whether what is computed now is a tensor like any other, and no part of a program that will
    run again with other values."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _versions(mask: Mask) -> tuple[int, ...] | None:
    """How often the mask's tensors were written to; None where that is not known."""
    leaves = pytree.tree_leaves(mask)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # a mask of the user's may hold anything, and inference tensors do not count
    if any(isinstance(leaf, Mask) for leaf in leaves) or any(t.is_inference() for t in tensors):
        return None
    return tuple(tensor._version for tensor in tensors)


class cached(Generic[Made]):
    """`functools.cached_property` that torch.compile can trace: there it is computed each time,
    unless it was kept before."""

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
        value = self.func(instance)
        if not torch.compiler.is_compiling():
            vars(instance)[self.name] = value
        return value
