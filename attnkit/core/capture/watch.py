"""Observation of the attention of a model, call by call while it runs."""

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
    """Collect the attention calls that run in the block, in order, with their inputs and outputs.

        with watch_attention(model) as calls:
            logits = model(images)
        gradients = torch.autograd.grad(logits[:, 3].sum(), [call.output for call in calls])

    This observes `attend`, and so all attention of attnkit, any call of torch's
    `scaled_dot_product_attention`, and torch_geometric's convolutions. The kernels do not change. A
    layer that runs again in a backward pass, as with activation checkpointing, is not another call.
    Compiled modules run uncompiled inside the block.

    Args:
        model: any module.
        layers: positions in the order in which layers ran, or names (`*` matches anything); None:
            all. A layer is the module in whose forward the attention ran.

    Raises:
        ValueError: no such layer ran; the model ran no attention; or a selected layer computes it
            in a way that cannot be observed, by a softmax and a product of its own.
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
    """Call `hear` with each attention call of the model in the block; yields the running modules.

    `hear` is called as the layers run; for layers selected by a position from the end, after the
    model has run.

    Args:
        choice: the selected layers; None: all.
        served: modules whose attention is captured in another way, each with whether its calls of
            `attend` are to be reported nevertheless.

    Raises:
        ValueError: as `watch_attention`, at the end of the model's forward or of the block.
    """
    listener = _Listener(model, hear, choice or LayerChoice(None), served or {})
    with ExitStack() as stack:
        stack.enter_context(listening(listener, listener.running))
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
def listening(listener: Listener, running: RunningModules) -> Iterator[None]:
    """Notify the listener in the block of `attend`, torch's functions and transformers' interface,
    and follow the running modules."""
    with (
        LISTENERS.opened(listener),
        uncompiled(),
        running.followed(),
        functions_handled(FunctionTap()),
        watch_interface(),
    ):
        yield


class _Listener:
    """Listener that finds the layer of each attention and passes on calls of selected layers."""

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
        """Note a call of attention, and pass it on once it is known to be selected."""
        self.running.keep(self.choice.ran, call.layer, object())
        if not self.waiting and self.choice.is_sure(call.layer):
            self.hear(call)
        else:
            self.running.append(self.waiting, call)
            self.waiting[:] = [call for call in self.waiting if self.choice.may_have(call.layer)]

    def _layer(self, seen: Seen | None) -> str | None:
        """Return the layer's name; None if it is not in the model, or is captured elsewhere."""
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
        """Pass on the waiting calls once the model has run.

        Raises:
            ValueError: the attention of a selected layer, or of the whole model, is not observed.
        """
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
