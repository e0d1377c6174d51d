"""`attend`, the one function all attention in attnkit goes through; its weights on demand, whatever
kernel computes the output; and the listeners that it notifies."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import index
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import tensors_only
from attnkit.core.contexts import Opened
from attnkit.core.inputs import Inputs, check_inputs, in_high_precision
from attnkit.core.kernels.base import explain_missing_second_derivative
from attnkit.core.kernels.choose import choose_backend
from attnkit.core.kernels.sdpa import is_plain_flash
from attnkit.core.key_masking import HIDING, attend_without_hidden
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import EdgeFeatures, Edges
from attnkit.core.normalizers import NORMALIZERS, Normalizer
from attnkit.core.operators.precision import EXACT, no_autocast
from attnkit.core.scores.kinds import SCORES, Score

_PLAIN_SCORE = ("scaled_dot", SCORES["scaled_dot"])
_PLAIN_NORMALIZER = ("softmax", NORMALIZERS["softmax"])


def attend(
    query: Annotated[Tensor, "*batch heads queries head_dim"],
    key: Annotated[Tensor, "*batch kv_heads keys head_dim"],
    value: Annotated[Tensor, "*batch kv_heads keys value_dim"],
    *,
    score: str | Score = "scaled_dot",
    mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
    bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None,
    normalizer: str | Normalizer = "softmax",
    edge_features: EdgeFeatures | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sink: Annotated[Tensor, "heads"] | None = None,
    backend: str = "auto",
) -> Annotated[Tensor, "*batch heads queries value_dim"]:
    """Compute attention: for each query, the average of the values, weighted by how well their keys
    match.

        output_i = Σ_j softmax_j(score(query_i, key_j) + bias_ij) · value_j

    The sum goes over the keys j that the mask allows; `normalizer` may replace the softmax. A query
    that may look nowhere gets exactly 0, and so do its gradients.

    Args:
        query, key, value: all three may lack the batch dimension. kv_heads divides heads
            (grouped-query attention: query head h reads key/value head h // (heads // kv_heads)).
        score: how well a query matches a key: a score of `attnkit.scores`, `General(weight)`,
            `Cosine(temperature)`, `Gaussian(bandwidth)`, `Additive(vector)`, any of them with a
            `softcap`; or a name: "scaled_dot", query·key · scale (Vaswani et al. 2017), "dot",
            query·key (Luong et al. 2015), "cosine" and "gaussian" with temperature and bandwidth 1.
        mask: where to look, True = may look: `Causal`, `Padding`, `Window`, `Window2d`, `Packed`,
            `Blocks`, `Edges`, `Dense`, a combination of these by `&`, `|` and `~`, or a boolean
            tensor. None: everywhere.
        bias: added to the scores. `ALiBi`, `RelativeBias1d` and `RelativeBias2d` make such tensors.
        normalizer: how scores become weights: "softmax"; "hard", all weight on one key, drawn at
            random or the best (`Hard(estimator)`); "linear", φ(q)·φ(k) divided by its sum
            (`Linear(feature_map)`); or `DeltaRule(beta)`, fast weights.
        edge_features: what the edges of a graph add to keys and values; only with `Edges`.
        scale: the factor of "scaled_dot"; 1/√head_dim if None.
        dropout_p: the share of weights zeroed, the rest scaled by 1/(1 − dropout_p). Applied
            whenever it is not 0; modules pass 0 in evaluation.
        sink: a logit s for each query head, which takes weight and has no value (the learned sinks
            of gpt-oss, OpenAI 2025): weight_ij = e^score_ij / (e^s + Σ_j e^score_ij). Only with
            softmax; −∞ disables it.
        backend: "auto" takes the first kernel that supports these arguments and is worthwhile at
            these sizes; it skips kernels that `attnkit doctor` found wrong on this machine, and
            takes a faster one if doctor measured it. "edges_triton", "edges_numba", "edges",
            "varlen", "block_sparse", "flex", "flash", "cudnn", "efficient", "linear", "delta_rule",
            "blockwise", "hard", "math" or "reference" forces that kernel, whatever doctor found.
            `attnkit.explain_backends` lists the kernels that can compute an attention, and why the
            others cannot.

    Returns:
        The averages, in the dtype of the inputs (under autocast, in autocast's dtype).

    Raises:
        ValueError, TypeError: an argument has a wrong value, shape or type, or is not supported.
        UnsupportedError: the forced backend cannot compute this; the message gives every reason.
    """
    if not torch.compiler.is_compiling() and (HIDING.variable.get() or LISTENERS.variable.get()):
        if HIDING.get():
            return attend_without_hidden(attend, locals())
        if LISTENERS.get():
            return watched(attend, locals())
    if (
        mask is None
        and bias is None
        and edge_features is None
        and sink is None
        and scale is None
        and score in _PLAIN_SCORE
        and normalizer in _PLAIN_NORMALIZER
        and backend == "auto"
        and dropout_p == 0
        and isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and is_plain_flash(query, key, value)
        and not EXACT.variable.get()
    ):
        output = F.scaled_dot_product_attention(query, key, value)
        explain_missing_second_derivative(output, "flash")
        return output
    tensors_only(query=query, key=key, value=value)
    is_batched = not query.ndim == key.ndim == value.ndim == 3
    if not is_batched:
        query, key, value = query[None], key[None], value[None]
    inputs = check_inputs(
        query,
        key,
        value,
        score=score,
        mask=mask,
        bias=bias,
        normalizer=normalizer,
        edge_features=edge_features,
        scale=scale,
        dropout_p=dropout_p,
        sink=sink,
    )
    kernel = choose_backend(inputs, backend)
    if torch.compiler.is_compiling() or not (inputs.dropout_p or inputs.normalizer.draws):
        output = kernel(inputs)
    else:
        from attnkit.core.kernels.recompute import nothing_drawn_on_error

        with nothing_drawn_on_error(inputs):
            output = kernel(inputs)
    return output if is_batched else output[0]


Indices = int | slice | Sequence[int] | Annotated[Tensor, "_", int] | None
"""Rows or heads: one index, a slice, several indices, or None for all. Negative indices count from
the end."""

BLOCK_ELEMENTS = 2**24  # scores computed at once: 64 MB in float32


def attention_weights(
    query: Annotated[Tensor, "batch heads queries head_dim"],
    key: Annotated[Tensor, "batch kv_heads keys head_dim"],
    *,
    score: str | Score = "scaled_dot",
    mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
    bias: Annotated[Tensor, "#batch #heads #queries #keys"] | None = None,
    normalizer: str | Normalizer = "softmax",
    scale: float | None = None,
    sink: Annotated[Tensor, "heads"] | None = None,
    rows: Indices = None,
    heads: Indices = None,
) -> Annotated[Tensor, "batch chosen_heads rows keys"]:
    """Compute the weights of `attend`: softmax_j(score(query_i, key_j) + bias_ij).

    These are the weights before dropout, for the given query rows and heads only. They are computed
    in float32 (float64 if the inputs are), a block of rows at a time, so that beside the result
    only one block of scores is held. They are differentiable.

    Args:
        query, key, score, mask, bias, normalizer, scale, sink: as in `attend`; with a sink, the
            weights of a row sum to less than 1.
        rows: query rows; None: all.
        heads: query heads; None: all.

    Returns:
        The weights, in the dtype of the inputs; a row that may look nowhere is 0.

    Raises:
        IndexError: a row or head does not exist. Otherwise as `attend`.
    """
    inputs = check_inputs(
        query,
        key,
        key,
        score=score,
        mask=mask,
        bias=bias,
        normalizer=normalizer,
        scale=scale,
        sink=sink,
    )
    if isinstance(inputs.mask, Edges) and inputs.mask.has_repeated:
        raise ValueError(
            "mask: expected no duplicate edges; attnkit.edge_weights gives a weight for each"
        )
    row_indices = as_indices("rows", rows, inputs.num_queries, query.device)
    head_indices = as_indices("heads", heads, query.shape[1], query.device)
    exact = of_heads(inputs, head_indices)
    with no_autocast(query):
        blocks = [
            weights_of_rows(exact, block, head_indices).to(inputs.query.dtype)
            for block in row_blocks(exact, row_indices)
        ]
    return torch.cat(blocks, dim=2)


def of_heads(inputs: Inputs, heads: Tensor) -> Inputs:
    """Return the attention of the given query heads in high precision, each with a key and value
    head of its own; bias and mask stay those of all heads."""
    kv_heads = heads // (inputs.query.shape[1] // inputs.key.shape[1])
    return in_high_precision(
        replace(
            inputs,
            query=inputs.query[:, heads],
            key=inputs.key[:, kv_heads],
            value=inputs.value[:, kv_heads],
            score=inputs.score.select(heads),
            normalizer=inputs.normalizer.select(heads),
            sink=None if inputs.sink is None else inputs.sink[heads],
        )
    ).as_scaled_dot()


def row_blocks(
    inputs: Inputs, rows: Tensor, block_elements: int | None = None
) -> tuple[Tensor, ...]:
    """Split the rows into parts with at most `block_elements` scores each, at least one row."""
    per_row = max(1, inputs.query.shape[0] * inputs.query.shape[1] * inputs.num_keys)
    return rows.split(max(1, (block_elements or BLOCK_ELEMENTS) // per_row))


def weights_of_rows(inputs: Inputs, rows: Tensor, heads: Tensor) -> Tensor:
    """Compute the weights [batch, heads, rows, keys]; `inputs` is `of_heads(…, heads)`."""
    bias, allowed = inputs.bias, None
    if bias is not None:
        bias = bias if bias.shape[1] == 1 else bias[:, heads]
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
    if inputs.mask is not None:
        items = torch.arange(len(inputs.query), device=rows.device)
        allowed = inputs.mask.select(items, heads, rows, inputs.num_queries, inputs.num_keys)
    block = replace(inputs, query=inputs.query[:, :, rows], bias=bias)
    return inputs.normalizer.weights(block, allowed)


def of_edges(
    weights: Annotated[Tensor, "edges heads"], rows: Indices, heads: Indices
) -> Annotated[Tensor, "rows chosen_heads"]:
    """Return the weights of the given edges and heads of a graph."""
    row_indices = as_indices("rows", rows, len(weights), weights.device)
    head_indices = as_indices("heads", heads, weights.shape[1], weights.device)
    return weights[row_indices[:, None], head_indices]


def as_indices(name: str, given: Indices, size: int, device: torch.device) -> Tensor:
    """Return the given indices as a tensor of numbers from 0 to size − 1.

    Raises:
        IndexError, TypeError: an index is out of range, or not an integer.
    """
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


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention that ran, without the name of its layer."""

    tap: str
    inputs: Inputs
    output: Tensor
    """[batch, heads, queries, value_dim]; the caller gets this tensor or a view of it."""
    is_batched: bool = True
    """Whether the caller's tensors have a batch dimension; those of graphs have none."""
    module: nn.Module | None = None
    """The module in which it ran, if that is not the innermost running module."""


class Listener(Protocol):
    """An observer of attention."""

    def see(self, seen: Seen) -> None:
        """Handle an attention that ran."""

    def miss(self, what: str, advice: str) -> None:
        """Handle an attention that ran and cannot be observed: a description, and advice."""


LISTENERS: Opened[Listener] = Opened("listeners")


def without_listeners() -> AbstractContextManager[tuple[Listener, ...]]:
    """Suspend the listeners in the block, which they are notified of as a whole; yields them."""
    return LISTENERS.limited(0)


def is_recomputed() -> bool:
    """Return whether a backward pass is running: a forward in it is a second run by activation
    checkpointing, of which listeners are not notified."""
    return torch._C._current_graph_task_id() != -1


def notify_missed(listeners: Sequence[Listener], *, is_nested: bool = False) -> None:
    """Notify the listeners of attention that cannot be observed: on nested tensors, or by the
    model's own functions."""
    for listener in listeners:
        if is_nested:
            listener.miss("of nested tensors", "pad them and give a mask")
        else:
            listener.miss("by functions of its own", "attnkit.replace_attention(model) first")


def notify(listeners: Sequence[Listener], seen: Seen) -> None:
    """Notify the listeners of an attention that ran."""
    for listener in listeners:
        listener.see(seen)


def watched(attend: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
    """Compute `attend(**given)` and notify the listeners of it, but not of torch's calls inside."""
    if is_recomputed():
        with without_listeners():
            return attend(**given)
    is_batched = not given["query"].ndim == given["key"].ndim == given["value"].ndim == 3
    if not is_batched:
        # the caller's output is then computed from the observed one, which so has a gradient
        given = given | {name: given[name][None] for name in ("query", "key", "value")}
    with without_listeners() as listeners:
        output = attend(**given)
        options = {name: option for name, option in given.items() if name != "backend"}
        notify(listeners, Seen("attend", check_inputs(**options), output, is_batched))
    return output if is_batched else output[0]
