"""`attend`, the one function all attention in attnkit goes through."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.arguments import tensors_only
from attnkit.core.inputs import check_inputs
from attnkit.core.kernels.base import explain_missing_second_derivative
from attnkit.core.kernels.choose import choose_backend
from attnkit.core.kernels.sdpa import is_plain_flash
from attnkit.core.key_masking import HIDING, attend_without_hidden
from attnkit.core.listeners import LISTENERS, watched
from attnkit.core.masks.base import Mask
from attnkit.core.masks.edges import EdgeFeatures
from attnkit.core.normalizers import NORMALIZERS, Normalizer
from attnkit.core.operators.precision import EXACT
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
