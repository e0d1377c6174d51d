"""The attention weights of a model's layers, collected while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from attnkit.core.running import module_name
from attnkit.core.weights import Indices


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
    layers: int | str | Sequence[int | str] | None = None,
    rows: Indices = None,
    heads: Indices = None,
) -> Iterator[AttentionWeights]:
    """Collect the attention weights of a model's layers while it runs.

        with attnkit.capture_attention(vit, layers=-1, rows=0) as weights:
            logits = vit(images)
        weights["blocks.11.attention"][0]    # [batch, heads, 1, tokens]
        print(weights)                       # layers, calls, shapes

    The kernels that compute the output stay what they were: the weights asked for are computed
    beside them, without gradients, by the modules' own `attention_weights`, for every call of
    `forward`. Compiled modules run uncompiled inside the block, since hooks added after
    compilation would not be called.

    Args:
        model: any module that contains attention of attnkit, or of yours with a method
            `attention_weights(<arguments of forward>, rows=, heads=)`.
        layers: positions among those modules, or names (`*` matches anything); None for all.
        rows: which queries, None for all. A layer may ask for fewer than all tokens: the last
            block of a ViT with class-token pooling has row 0 only.
        heads: which heads, None for all.

    Raises:
        ValueError: the model has no such layers.
        IndexError: a layer has no such row or head; the layer is named.
    """
    captured = AttentionWeights()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in _select_layers(model, layers).items():

            def hook(module, args, kwargs, output, name=name):
                try:
                    with torch.no_grad():
                        weights = module.attention_weights(*args, **kwargs, rows=rows, heads=heads)
                except IndexError as error:
                    raise IndexError(f"{name}: {error}") from None
                captured.setdefault(name, []).append(weights)

            handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield captured


def _select_layers(
    model: nn.Module, layers: int | str | Sequence[int | str] | None
) -> dict[str, nn.Module]:
    found = {
        module_name(name): module
        for name, module in model.named_modules()
        if callable(getattr(module, "attention_weights", None))
    }
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no module with attention weights; "
            "one of timm or torchvision: attnkit.replace_attention(model) first"
        )
    if layers is None:
        return found
    names = list(found)
    chosen: dict[str, nn.Module] = {}
    for layer in [layers] if isinstance(layers, int | str) else layers:
        if isinstance(layer, int):
            matches = names[layer : layer + 1 or None] if -len(names) <= layer else []
        else:
            matches = [name for name in names if fnmatchcase(name, layer)]
        if not matches:
            raise ValueError(
                f"layers: {layer!r} is none of the {len(names)} attention layers {', '.join(names)}"
            )
        chosen.update((name, found[name]) for name in matches)
    return chosen
