"""Whether operators may be replaced by quicker ones of the same results."""

import torch
from torch import Tensor, nn

PLAIN = {Tensor, nn.Parameter}


def is_plain(*tensors: Tensor) -> bool:
    """Whether it is on a CPU, outside of tracing and torch.func."""
    return all(tensor.is_cpu and type(tensor) in PLAIN for tensor in tensors) and not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )
