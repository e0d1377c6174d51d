"""Observation of the attention of a model while it runs: its calls, and its weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import AttentionCall, Call, edge_call, is_of_edges
from attnkit.core.capture.functions import FunctionTap, watch_interface
from attnkit.core.capture.pyg import attention_convolutions, watch_convolutions
from attnkit.core.contexts import uncompiled
from attnkit.core.listeners import LISTENERS, Listener, Seen, is_recomputed, without_listeners
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.running import RunningModules, functions_handled, module_name
from attnkit.core.weights import Indices, of_edges

Layers = int | str | Sequence[int | str] | None
"""Positions or names (`*` matches anything); None for all."""


class LayerChoice:
    """The layers that a user selects.

    Args:
        layers: the user's argument.
        known: the names in the order that positions refer to; None: the layers in the order in
            which they run.
    """

    def __init__(self, layers: Layers, known: Sequence[str] | None = None) -> None:
        self.asked: list[int | str] | None = None
        if layers is not None:
            self.asked = [layers] if isinstance(layers, int | str) else list(layers)
        self.is_known = known is not None
        self.known = list(known or ())
        self.ran: dict[str, list[object]] = {}
        """For each layer that ran, one item per run."""

    @property
    def names(self) -> list[str]:
        """The names that positions refer to."""
        return self.known if self.is_known else [*self.ran]

    def has(self, name: str) -> bool:
        """Return whether a layer is selected, given the layers that have run so far."""
        return self.asked is None or any(self._is_meant(asked, name) for asked in self.asked)

    def may_have(self, name: str) -> bool:
        """Return whether a layer is selected, or may be once more layers have run: a position that
        counts from the end then refers to an earlier layer than now."""
        if self.has(name) or self.is_known or name not in self.names:
            return self.has(name)
        from_end = self.names.index(name) - len(self.names)
        return any(isinstance(asked, int) and asked < from_end for asked in self.asked or ())

    def is_sure(self, name: str) -> bool:
        """Return whether a layer is selected however many layers run after it."""
        if self.asked is None or self.is_known:
            return self.has(name)
        lasting = [asked for asked in self.asked if isinstance(asked, str) or asked >= 0]
        return any(self._is_meant(asked, name) for asked in lasting)

    def check(self, others: Sequence[str] = ()) -> None:
        """Raise ValueError if a selection matches neither a layer nor one of the other names."""
        names = list(dict.fromkeys([*self.names, *self.ran]))
        for asked in self.asked or ():
            if not any(self._is_meant(asked, name) for name in (*names, *others)):
                ran = "" if self.is_known else " that ran"
                raise ValueError(
                    f"layers: {asked!r} is none of the {len(names)} attention layers{ran}: "
                    f"{', '.join(name or '(the model)' for name in names)}"
                )

    def _is_meant(self, asked: int | str, name: str) -> bool:
        if isinstance(asked, str):
            return fnmatchcase(name, asked)
        return -len(self.names) <= asked < len(self.names) and self.names[asked] == name


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


class AttentionWeights(dict[str, list[Tensor]]):
    """`weights[layer][call]`: a dict of lists of tensors, which is printed as a table of shapes."""

    def __repr__(self) -> str:
        rows = [("layer", "calls", "weights")]
        for name, calls in self.items():
            shapes = dict.fromkeys(str(list(weights.shape)) for weights in calls)
            rows.append((name or "(itself)", str(len(calls)), ", ".join(shapes)))
        if len(rows) == 1:
            return "no attention weights: the model has not run in the block"
        wide, most = (max(len(row[place]) for row in rows) for place in (0, 1))
        return "\n".join(f"{name:<{wide}}  {calls:>{most}}  {end}" for name, calls, end in rows)


@contextmanager
def capture_attention(
    model: nn.Module,
    layers: Layers = None,
    rows: Indices = None,
    heads: Indices = None,
) -> Iterator[AttentionWeights]:
    """Collect the attention weights of any model's layers while it runs.

        with attnkit.capture_attention(vit, layers=-1, rows=0) as weights:
            logits = vit(images)
        weights["blocks.11.attention"][0]    # [batch, heads, 1, tokens]
        print(weights)                       # layers, calls, shapes

    The kernels that compute the output do not change. Only the weights you ask for are computed in
    addition, for every call, without gradients and before dropout. This works for all layers of
    attnkit, torch's `MultiheadAttention`, any code that calls torch's
    `scaled_dot_product_attention` (such as timm), and models of transformers, including its eager
    and flex interfaces. For a graph the weights are [edges, heads], in the caller's order. A layer
    that runs again in the backward pass (activation checkpointing) does not count as another call.
    Compiled modules run uncompiled inside the block, because compiled code cannot be observed.
    Other threads are observed if they run in this context, as `asyncio.to_thread` does.

    Args:
        model: any module. If your own module has a method
            `attention_weights(<arguments of forward>, rows=, heads=)`, it is called.
        layers: names (`*` matches anything), or positions among the modules that have such a
            method, as attnkit's have; if none has it, in the order they run. None for all.
        rows: query rows; None: all. A layer may have fewer queries than tokens: the last block of a
            ViT with class-token pooling has row 0 only.
        heads: heads; None: all.

    Raises:
        ValueError: the model has no such layers, or no attention that can be observed. The message
            names a module that computes its own attention by a softmax and a product; this may be
            known only after the run.
        IndexError: a layer, named in the message, has no such row or head.
    """
    captured = AttentionWeights()
    found = {
        module_name(name): module
        for name, module in model.named_modules()
        if callable(getattr(module, "attention_weights", None))
    }
    choice = LayerChoice(layers, list(found) if found else None)
    if found:  # a name that is not even a module raises before the model runs
        choice.check([module_name(name) for name, _ in model.named_modules()])

    def keep(call: Call) -> None:
        running.keep(captured, call.layer, _weights(call, rows, heads))

    served = {module: _uses_attend(module) for module in found.values()}
    with ExitStack() as stack:
        running = stack.enter_context(told_of_attention(model, keep, choice, served))
        for name, module in found.items():
            if served[module] or not choice.has(name):
                continue

            def hook(module, args, kwargs, output, name=name):
                if is_recomputed() or not running.is_followed:
                    return
                running.keep(choice.ran, name, object())
                try:
                    with torch.no_grad(), without_listeners():
                        weights = module.attention_weights(*args, **kwargs, rows=rows, heads=heads)
                except IndexError as error:
                    raise IndexError(f"{name}: {error}") from None
                running.keep(captured, name, weights)

            handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield captured


def _uses_attend(module: nn.Module) -> bool:
    """Return whether the module's method returns weights of `attend`, which is observed anyway."""
    theirs = getattr(type(module), "attention_weights", None)
    return theirs is MultiHeadAttention.attention_weights


def _weights(call: Call, rows: Indices, heads: Indices) -> Tensor:
    if isinstance(call, AttentionCall):
        return call.weights(rows, heads).to(call.query.dtype)
    try:
        return of_edges(call.weights, rows, heads)
    except IndexError as error:
        raise IndexError(f"{call.layer}: {error}") from None
