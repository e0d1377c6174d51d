"""Collection of the attention weights of a model's layers while it runs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from attnkit.core.capture.calls import AttentionCall, Call
from attnkit.core.capture.layers import LayerChoice, Layers
from attnkit.core.capture.watch import told_of_attention
from attnkit.core.listeners import is_recomputed, without_listeners
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.running import module_name
from attnkit.core.weights import Indices, of_edges


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
