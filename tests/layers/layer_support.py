"""What tests of layers share: random weights, equality with gradients, patterns of attention."""

import re

import pytest
import torch
from torch import nn

PATTERNS = {
    "full": {},
    "heads": {"num_heads": 2, "inner_channels": 6, "value_channels": 14, "score": "cosine"},
    "max": {"pool": 2},
    "average": {"pool": 3, "pooling": "average"},
    "window": {"pattern": "window", "radius": 1},
    "axial": {"pattern": "axial"},
    "criss_cross": {"pattern": "criss_cross"},
    "edges": {"pattern": "criss_cross", "backend": "edges"},
}


def randomised(module, std=0.3):
    """The module in float64 and evaluation, with random weights and running statistics."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    for name, buffer in module.named_buffers():
        if "running" in name:
            nn.init.uniform_(buffer, 0.5, 2.0)
    return module.double().eval()


def assert_same(actual, expected, tensors, others=None, rtol=1e-9, atol=1e-10):
    """Equal outputs, and equal gradients of `tensors` and of `others`, which they correspond to."""
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    towards = torch.randn_like(expected)
    ours = torch.autograd.grad(actual, tensors, towards)
    theirs = torch.autograd.grad(expected, others or tensors, towards)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their.reshape(our.shape), rtol=rtol, atol=atol)


def assert_named(call, message):
    """The call is refused by an error whose type and text, "ValueError: heads: …", match."""
    with pytest.raises((ValueError, TypeError, IndexError)) as raised:
        call()
    assert re.search(message, f"{raised.type.__name__}: {raised.value}")
    assert str(raised.value).count("\n") <= 1
