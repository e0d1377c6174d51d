"""The tensor of a mask, made once for all the layers that are given the same mask object."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnkit.core.masks.base import Mask


def kept_mask(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The dense mask, broadcastable to [batch, heads, queries, keys]: booleans, or in a floating
    dtype what is added to the scores, 0 or −∞.

    The last one made is kept with the mask object, and goes when that does. It is made again for
    other sizes, and where an operator of torch wrote into a tensor of the mask in between.
    """
    versions = _versions(mask) if _may_keep(device) else None
    if versions is None:
        return _made(mask, num_queries, num_keys, device, dtype)
    key = num_queries, num_keys, device, dtype, versions
    kept = vars(mask).get("_kept")
    if kept is None or kept[0] != key:
        with torch.inference_mode(False):  # for training too
            kept = key, _made(mask, num_queries, num_keys, device, dtype)
        if type(kept[1]) is Tensor:  # not a fake one
            vars(mask)["_kept"] = kept
    return kept[1]


def _made(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    allowed = mask.dense(num_queries, num_keys, device)
    if dtype == torch.bool:
        return allowed
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


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
