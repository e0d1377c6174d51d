"""Running a module to learn something about it, and leaving it as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In the block the module and all in it are in evaluation mode, afterwards as before."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """In the block the module is in evaluation and nothing has gradients; after it modes, buffers
    and torch's random numbers are as before, also if the block raised.

    Buffers are put back because some modules write them in evaluation too, and the random state
    because a module may draw whatever its mode is.
    """
    restore_buffers = buffers_of(module)
    tensors = (*module.parameters(), *module.buffers())
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), evaluating(module):
            yield
    finally:
        restore_buffers()


def buffers_of(module: nn.Module) -> Callable[[], None]:
    """A function that puts the buffers back as they are now, as often as it is called."""
    buffers = [
        (child, name, buffer, None if buffer is None else buffer.detach().clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
    ]

    @torch.no_grad()
    def restore() -> None:
        for child, name, buffer, value in buffers:
            child._buffers[name] = buffer
            if buffer is not None and value is not None and buffer.layout is torch.strided:
                with torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(value)

    return restore
