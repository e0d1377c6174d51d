"""Attention weights on demand, in blocks, whatever kernel computes the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import index

import torch
from torch import Tensor, nn

from attnkit.core.autocast import no_autocast
from attnkit.core.graph import Edges
from attnkit.core.inputs import Inputs, check_inputs, in_high_precision
from attnkit.core.masks import Mask
from attnkit.core.normalizers import Normalizer
from attnkit.core.record import module_name
from attnkit.core.scores import Score

__all__ = ["Indices", "as_indices", "attention_weights", "capture_attention"]

Indices = int | slice | Sequence[int] | Tensor | None
"""Which rows or heads: one, a slice, several, or None for all. Negative ones count from the end."""

BLOCK_ELEMENTS = 2**24  # scores computed at once: 64 MB in float32


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    score: str | Score = "scaled_dot",
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    normalizer: str | Normalizer = "softmax",
    scale: float | None = None,
    rows: Indices = None,
    heads: Indices = None,
) -> Tensor:
    """The weights `attend` averages the values with: softmax_j(score(query_i, key_j) + bias_ij).

    Before dropout, for the query rows and heads asked for and no others. Computed in float32
    (float64 if the inputs are), a block of rows at a time, so that beside the result only one
    block of scores is held. Differentiable.

    Args:
        query, key, score, mask, bias, normalizer, scale: as in `attend`.
        rows: which queries, None for all.
        heads: which query heads, None for all.

    Returns:
        [batch, len(heads), len(rows), keys], in the dtype of the inputs; a row that may look
        nowhere is 0.

    Raises:
        IndexError: a row or head that is not there. Else as `attend`.
    """
    inputs = check_inputs(
        query, key, key, score=score, mask=mask, bias=bias, normalizer=normalizer, scale=scale
    )
    if isinstance(inputs.mask, Edges) and inputs.mask.has_repeated:
        raise ValueError(
            "mask: an edge is given twice, and each has a weight; attnkit.edge_weights gives them"
        )
    batch, num_heads, num_queries, _ = inputs.query.shape
    row_indices = as_indices("rows", rows, num_queries, query.device)
    head_indices = as_indices("heads", heads, num_heads, query.device)
    kv_heads = head_indices // (num_heads // inputs.key.shape[1])
    exact = in_high_precision(
        replace(
            inputs,
            query=inputs.query[:, head_indices],
            key=inputs.key[:, kv_heads],
            score=inputs.score.select(head_indices),
            normalizer=inputs.normalizer.select(head_indices),
        )
    ).lowered()
    per_row = max(1, batch * len(head_indices) * inputs.num_keys)
    with no_autocast(query):
        blocks = [
            _weights_of_rows(exact, block, head_indices).to(inputs.query.dtype)
            for block in row_indices.split(max(1, BLOCK_ELEMENTS // per_row))
        ]
    return torch.cat(blocks, dim=2)


def _weights_of_rows(inputs: Inputs, rows: Tensor, heads: Tensor) -> Tensor:
    bias, allowed = inputs.bias, None
    if bias is not None:
        bias = bias if bias.shape[1] == 1 else bias[:, heads]
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
    if inputs.mask is not None:
        allowed = inputs.mask.select(rows, heads, inputs.num_queries, inputs.num_keys)
    block = replace(inputs, query=inputs.query[:, :, rows], bias=bias)
    return inputs.normalizer.weights(block, allowed, lean=True)


@contextmanager
def capture_attention(
    model: nn.Module,
    layers: int | str | Sequence[int | str] | None = None,
    rows: Indices = None,
    heads: Indices = None,
) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the attention weights of a model's layers while it runs.

        with attnkit.capture_attention(vit, layers=-1, rows=0) as weights:
            logits = vit(images)
        weights["blocks.11.attention"][0]    # [batch, heads, 1, tokens]

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
    captured: dict[str, list[Tensor]] = {}
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
        raise ValueError(f"model: {type(model).__name__} has no module with attention weights")
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


def as_indices(name: str, given: Indices, size: int, device: torch.device) -> Tensor:
    """Places from 0 to size − 1; IndexError or TypeError name what is wrong."""
    everything = torch.arange(size, device=device)
    if given is None:
        return everything
    if isinstance(given, slice):
        return everything[given]
    one = hasattr(given, "__index__") and not isinstance(given, Tensor)
    chosen = torch.as_tensor([index(given)] if one else given, device=device)  # type: ignore[arg-type]
    chosen = chosen.long() if chosen.numel() == 0 else chosen
    if chosen.dtype == torch.bool or chosen.is_floating_point() or chosen.ndim != 1:
        raise TypeError(f"{name}: expected an integer, a slice or integers, got {given!r}")
    if len(chosen) and (int(chosen.min()) < -size or int(chosen.max()) >= size):
        raise IndexError(f"{name}: there are {size}, got {given!r}")
    return everything[chosen.long()]
