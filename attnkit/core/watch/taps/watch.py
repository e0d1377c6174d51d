"""The attention of a model, told call by call while it runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from attnkit.core.listeners import LISTENERS, Seen
from attnkit.core.running import RunningModules
from attnkit.core.watch.taps.call import AttentionCall
from attnkit.core.watch.taps.edge_call import EdgeCall, edge_call, is_of_edges
from attnkit.core.watch.taps.functions import FunctionTap
from attnkit.core.watch.taps.layers import LayerChoice, Layers
from attnkit.core.watch.taps.pyg import attention_convolutions, watch_convolutions

Call = AttentionCall | EdgeCall


@contextmanager
def watch_attention(model: nn.Module, layers: Layers = None) -> Iterator[list[Call]]:
    """The calls of attention that run in the block, in their order, with what they were given.

        with watch_attention(model) as calls:
            logits = model(images)
        gradients = torch.autograd.grad(logits[0, 3], [call.output for call in calls])

    Seen are `attend`, so all attention of attnkit, torch's `scaled_dot_product_attention`, whoever
    calls it, and torch_geometric's convolutions. The kernels are what they are without it. What
    runs again in a backward pass, as with activation checkpointing, is not a further call.
    Compiled modules run uncompiled inside the block.

    Args:
        model: any module.
        layers: which layers: positions in the order they ran, or names (`*` matches anything);
            None for all. A layer is the module in whose forward the attention ran.
    """
    calls: list[Call] = []
    choice = LayerChoice(layers)
    with told_of_attention(model, lambda call: choice.add(call, calls)):
        yield calls
        choice.finish(calls)


@contextmanager
def told_of_attention(model: nn.Module, hear: Callable[[Call], None]) -> Iterator[None]:
    """In the block `hear(call)` is called for each attention of the model as it runs."""
    running = RunningModules(model)
    listener = _Listener(running, hear)
    LISTENERS.append(listener)
    with ExitStack() as stack:
        stack.callback(LISTENERS.remove, listener)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(running.followed())
        stack.enter_context(FunctionTap())
        convolutions = attention_convolutions(model)
        if convolutions:
            stack.enter_context(watch_convolutions(convolutions, hear))
        yield


class _Listener:
    """Names the layer of what ran, and tells it."""

    def __init__(self, running: RunningModules, hear: Callable[[Call], None]) -> None:
        self.running = running
        self.hear = hear

    def see(self, seen: Seen) -> None:
        if seen.module is None:
            layer = self.running.innermost_of_model()
        else:
            layer = self.running.names.get(seen.module)
        if layer is None:
            return
        if is_of_edges(seen.inputs, is_batched=seen.is_batched):
            self.hear(edge_call(layer, seen.inputs, seen.output))
        else:
            self.hear(AttentionCall(layer, seen.tap, seen.inputs, seen.output))
