"""A module that runs in another thread for longer than the block around its call."""

import contextvars
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

import attnkit

X = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begun, self.goes_on = Event(), Event()

    def forward(self, x, fails=False):
        self.begun.set()
        assert self.goes_on.wait(20)
        if fails:
            raise ValueError("this call fails")
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("has_context", [False, True])
def test_a_module_that_outlives_the_block(has_context, fails):
    with ThreadPoolExecutor(1) as pool:
        slow = Net()
        with attnkit.record_logits(slow):
            run = contextvars.copy_context().run if has_context else lambda f, *args: f(*args)
            call = pool.submit(run, slow, X, fails)
            assert slow.begun.wait(20)
        # another library's hook, behind ours: torch must not lose its place among them
        with torch_module.register_module_forward_hook(lambda *args: None):
            slow.goes_on.set()
            error = call.exception()
        assert (type(error), str(error)) == (
            (ValueError, "this call fails") if fails else (type(None), "None")
        )
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0
        for record in (attnkit.record_backends, attnkit.record_logits):  # of which the outer sees
            with record(slow) as outer, attnkit.record_logits(slow) as inner:
                pool.submit(contextvars.copy_context().run, slow, X).result()
            assert len(getattr(outer, "counts", outer)) == len(inner) == 1
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
