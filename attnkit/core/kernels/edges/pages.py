"""Large tensors in huge pages, where Linux lets a program ask for them."""

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

LEAST = 2**23  # bytes that are worth asking for
HUGE = 2**21  # bytes of such a page on x86-64 and, most often, on ARM


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The tensor, which has just been made: what is written to it first takes pages of 2 MiB.

    Rows that are read in no order then miss the cache of addresses less often, and the kernel is
    asked for fewer pages.
    """
    advise = _advise()
    if tensor.nbytes >= LEAST and advise is not None:
        first = -(-tensor.data_ptr() // HUGE) * HUGE
        size = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE - first
        advise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor


@cache
def _advise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux alone has it
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
