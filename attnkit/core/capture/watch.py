"""The attention of a model, told call by call while it runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from attnkit.core.capture.calls import AttentionCall, Call, edge_call, is_of_edges
from attnkit.core.capture.layers import LayerChoice, Layers
from attnkit.core.capture.pyg import attention_convolutions, watch_convolutions
from attnkit.core.capture.torch_functions import FunctionTap
from attnkit.core.capture.transformers import watch_interface
from attnkit.core.contexts import uncompiled
from attnkit.core.listeners import LISTENERS, Listener, Seen
from attnkit.core.running import RunningModules, functions_handled


@contextmanager
def watch_attention(model: nn.Module, layers: Layers = None) -> Iterator[list[Call]]:
    """The calls of attention that run in the block, in their order, with what they were given.

        with watch_attention(model) as calls:
            logits = model(images)
        gradients = torch.autograd.grad(logits[:, 3].sum(), [call.output for call in calls])

    Seen are `attend`, so all attention of attnkit, torch's `scaled_dot_product_attention`, whoever
    calls it, and torch_geometric's convolutions. The kernels are what they are without it. What
    runs again in a backward pass, as with activation checkpointing, is not a further call.
    Compiled modules run uncompiled inside the block.

    Args:
        model: any module.
        layers: which layers: positions in the order they ran, or names (`*` matches anything);
            None for all. A layer is the module in whose forward the attention ran.

    Raises:
        ValueError: no such layer ran; the model ran no attention, or a layer asked for computes it
            in a way that is not seen, by a softmax and a product of its own.
    """
    calls: list[Call] = []

    def keep(call: Call) -> None:
        running.append(calls, call)

    with told_of_attention(model, keep, LayerChoice(layers)) as running:
        yield calls


@contextmanager
def told_of_attention(
    model: nn.Module,
    hear: Callable[[Call], None],
    choice: LayerChoice | None = None,
    served: Mapping[nn.Module, bool] | None = None,
) -> Iterator[RunningModules]:
    """In the block `hear` is told the calls of attention in the model; gives the modules that run.

    It is told as they run, and of layers whose position counts from the end when the model has run.

    Args:
        choice: the layers that it is told of; None: all.
        served: modules whose attention others serve; with whether it is told nevertheless, where it
            is that of `attend`.

    Raises:
        ValueError: as `watch_attention`, at the end of the model's forward or of the block.
    """
    listener = _Listener(model, hear, choice or LayerChoice(None), served or {})
    with ExitStack() as stack:
        stack.enter_context(heard(listener, listener.running))
        stack.callback(model.register_forward_hook(listener.has_run).remove)
        convolutions = {
            name: module
            for name, module in attention_convolutions(model).items()
            if module not in listener.served
        }
        if convolutions:
            stack.enter_context(watch_convolutions(convolutions, listener.add))
        yield listener.running
        listener.settle()
        listener.choice.check()


@contextmanager
def heard(listener: Listener, running: RunningModules) -> Iterator[None]:
    """In the block the listener is told of `attend`, of torch's functions and of transformers'
    interface, and modules are followed."""
    with (
        LISTENERS.opened(listener),
        uncompiled(),
        running.followed(),
        functions_handled(FunctionTap()),
        watch_interface(),
    ):
        yield


class _Listener:
    """Names the layer of each attention that ran, and tells those that are asked for."""

    def __init__(
        self,
        model: nn.Module,
        hear: Callable[[Call], None],
        choice: LayerChoice,
        served: Mapping[nn.Module, bool],
    ) -> None:
        self.running = RunningModules(model)
        self.hear = hear
        self.choice = choice
        self.served = served
        self.waiting: list[Call] = []
        self.missed: dict[str, list[tuple[str, str]]] = {}

    def see(self, seen: Seen) -> None:
        layer = self._layer(seen)
        if layer is None:
            return
        if is_of_edges(seen.inputs, is_batched=seen.is_batched):
            self.add(edge_call(layer, seen.inputs, seen.output))
        else:
            self.add(AttentionCall(layer, seen.tap, seen.inputs, seen.output))

    def miss(self, what: str, advice: str) -> None:
        layer = self._layer(None)
        if layer is not None:
            self.running.keep(self.missed, layer, (what, advice))
            self.running.keep(self.choice.ran, layer, object())

    def add(self, call: Call) -> None:
        """A call of attention ran."""
        self.running.keep(self.choice.ran, call.layer, object())
        if not self.waiting and self.choice.is_sure(call.layer):
            self.hear(call)
        else:
            self.running.append(self.waiting, call)
            self.waiting[:] = [call for call in self.waiting if self.choice.may_have(call.layer)]

    def _layer(self, seen: Seen | None) -> str | None:
        """The name of the layer; None where it is none of the model's, or served by others."""
        modules = list(self.running.modules)
        if seen is not None and seen.module is not None:
            modules.append(seen.module)
        if seen is not None and seen.tap == "attend" and modules and self.served.get(modules[-1]):
            return self.running.names.get(modules[-1])
        if any(module in self.served for module in modules):
            return None
        if seen is not None and seen.module is not None:
            return self.running.names.get(seen.module)
        return self.running.innermost_of_model()

    def has_run(self, model: nn.Module, args: object, output: object) -> None:
        if self.running.is_followed:
            self.settle()

    def settle(self) -> None:
        """The model has run: ValueError where what was asked for is not seen."""
        for call in self.waiting:
            if self.choice.has(call.layer):
                self.hear(call)
        self.waiting.clear()
        kind = type(self.running.model).__name__
        missed = [name for name in self.missed if self.choice.has(name)]
        if missed:
            what, advice = self.missed[missed[0]][-1]
            first = ", ".join(name or "(the model)" for name in missed[:3])
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            raise ValueError(
                f"model: {kind} computes attention {what}, which are not seen, in {first}{more}; "
                f"{advice}, or leave them out by layers="
            )
        if not self.choice.names and not self.choice.ran:
            raise ValueError(
                f"model: {kind} has no attention of attnkit or of torch's functions that ran in "
                "the block; if it computes its own, attnkit.replace_attention(model) first"
            )
