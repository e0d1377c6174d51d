"""A module that runs in another thread for longer than the block around its call."""

import contextvars
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

import attnkit
from attnkit.core.running import undone_on_error

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


class Two(nn.Module):
    """Two layers, and what is done before each and behind them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (attnkit.MultiHeadAttention(8, 2) for _ in range(2))

    def forward(self, x, *steps):
        for number, layer in enumerate((self.a, self.b, nn.Identity())):
            if number < len(steps):
                steps[number]()
            x = layer(x)
        return x


@pytest.mark.parametrize("record", ["capture_attention", "record_logits", "record_backends"])
@pytest.mark.parametrize("first", ["good", "bad"])
def test_of_two_calls_only_what_the_one_that_raises_has_told_is_taken_back(first, record):
    torch.manual_seed(0)
    model, good, bad = Two(), torch.randn(1, 4, 8), 5 * torch.randn(1, 4, 8)
    record = getattr(attnkit, record)
    inside, goes_on, started = Event(), Event(), []

    def fails():
        inside.set()
        assert goes_on.wait(20)
        raise ValueError("this call fails")

    with ThreadPoolExecutor(1) as pool, record(model) as found:
        run = contextvars.copy_context().run

        def start_bad():
            started.append(pool.submit(run, model, bad, fails))
            assert inside.wait(20)

        def end_bad():
            goes_on.set()
            assert started[0].exception() is not None

        def run_good_and_fail():
            pool.submit(run, model, good).result()
            raise ValueError("this call fails")

        if first == "good":
            model(good, int, start_bad, end_bad)
        else:
            with pytest.raises(ValueError, match="this call fails"):
                model(bad, int, run_good_and_fail)
    with record(model) as alone:
        model(good)
    if record is attnkit.record_backends:
        assert found.counts == alone.counts
    else:
        torch.testing.assert_close(dict(found), dict(alone))


def test_a_step_that_raises_leaves_what_another_thread_has_told():
    model, x = Two(), torch.randn(1, 4, 8)
    with ThreadPoolExecutor(1) as pool, attnkit.capture_attention(model) as found:
        run = contextvars.copy_context().run
        with suppress(ValueError), undone_on_error():
            model(x)
            pool.submit(run, model, x).result()
            raise ValueError("this step fails")
    assert {name: len(calls) for name, calls in found.items()} == {"a": 1, "b": 1}
