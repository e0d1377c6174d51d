"""The definition of attention in plain code, against which every kernel is tested; and the same in
blocks of queries, which never takes memory of queries × keys."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import Backend, empty_reasons
from attnkit.core.kernels.recompute import in_blocks
from attnkit.core.masks.edges import Edges
from attnkit.core.normalizers import Normalizer, Softmax, masked_scores, revived, softmax
from attnkit.core.operators.precision import no_autocast
from attnkit.core.scores.kinds import Score


@dataclass(frozen=True, eq=False)
class _Definition(Score):
    """A score that is computed by the definition of another score."""

    score: Score

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.score.definition(query, key)


def reference_attention(inputs: Inputs) -> Tensor:
    """Compute output_i = Σ_j dropout(normalizer_j(score(q_i, k_j) + bias_ij)) · v_j over the j that
    the mask allows.

    With `Edges` as the mask, and softmax, the sum goes over edges, and an edge given twice counts
    twice. It is computed in float32 (float64 if the inputs are) and has the dtype of the inputs.
    """
    exact = in_high_precision(inputs)
    key, value = exact.repeated_heads()
    exact = replace(exact, key=key, value=value)
    with no_autocast(inputs.query):
        if isinstance(exact.mask, Edges) and isinstance(exact.normalizer, Softmax):
            output = _over_edges(exact, exact.mask)
        else:
            exact = replace(exact, score=_Definition(exact.score))
            weights = exact.normalizer.weights(exact, exact.dense_mask())
            output = F.dropout(weights, exact.dropout_p) @ value
    return output.to(inputs.query.dtype)


def _over_edges(inputs: Inputs, edges: Edges) -> Tensor:
    weights = F.dropout(softmax_of_edges(inputs, edges), inputs.dropout_p)
    source, target = edges.edge_index
    value = inputs.value[:, :, source]
    features = inputs.edge_features
    if features is not None and features.value_weight is not None:
        assert features.features is not None
        value = value + features.features @ features.value_weight.transpose(1, 2)
    output = value.new_zeros(*inputs.query.shape[:3], value.shape[3])
    return _added(output, target, weights[..., None] * value)


def scores_of_edges(inputs: Inputs, edges: Edges) -> Tensor:
    """Compute score(q_i, k_j + W_k e_ij) + b_ij + bias_ij, [batch, heads, edges]."""
    edges.check_nodes()
    source, target = edges.edge_index
    query, key = inputs.query[:, :, target], inputs.key[:, :, source]
    features = inputs.edge_features
    if features is not None and features.key_weight is not None:
        assert features.features is not None
        key = key + features.features @ features.key_weight.transpose(1, 2)
    # each edge is an item of a batch, with one query and one key
    pairs = (tensor.transpose(1, 2).flatten(0, 1).unsqueeze(2) for tensor in (query, key))
    scores = inputs.score.definition(*pairs).flatten(1)
    scores = scores.unflatten(0, (query.shape[0], target.shape[0])).transpose(1, 2)
    if features is not None and features.bias is not None:
        scores = scores + features.bias
    if inputs.bias is not None:
        shape = (*query.shape[:2], inputs.num_queries, inputs.num_keys)
        scores = scores + inputs.bias.expand(shape)[:, :, target, source]
    return scores


def softmax_of_edges(inputs: Inputs, edges: Edges) -> Tensor:
    """Compute the softmax of `scores_of_edges` over the edges of each target, and the sink."""
    target, scores, sink = edges.edge_index[1], scores_of_edges(inputs, edges), inputs.sink
    largest = scores.new_full(inputs.query.shape[:3], -torch.inf)
    places = target.long().expand_as(scores)
    largest = largest.scatter_reduce(2, places, scores.detach(), "amax")
    if sink is not None:
        largest = torch.maximum(largest, sink.detach()[:, None])
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    exponentials = (scores - largest[:, :, target]).exp()
    others = torch.zeros_like(largest) if sink is None else (sink[:, None] - largest).exp()
    totals = _added(others, target, exponentials)[:, :, target]
    return exponentials / totals.masked_fill(totals == 0, 1.0)


def _added(sums: Tensor, target: Tensor, rows: Tensor) -> Tensor:
    """Return the sums [batch, heads, targets, …] plus each edge's row [batch, heads, edges, …]."""
    # not index_add: ONNX exports it as ScatterND, which onnxruntime adds wrongly with threads
    places = target.long().view(-1, *(1,) * (rows.ndim - 3)).expand_as(rows)
    return sums.scatter_add(2, places, rows)


class Reference(Backend):
    """The kernel that computes the definition itself; it supports everything and is slow."""

    name = "reference"
    normalizers = (Normalizer,)
    has_all_derivatives = True
    has_sink = True
    reads_edges = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        mask, normalizer = inputs.mask, inputs.normalizer
        if normalizer.draws:
            yield "cannot sample keys"
        elif isinstance(mask, Edges) and not isinstance(normalizer, Softmax):
            if torch.compiler.is_exporting():
                yield (
                    f"cannot tell in an exported program whether Edges has duplicates, which "
                    f"{normalizer} does not support; use them as Edges(...) & Dense(...)"
                )
            elif mask.has_repeated:
                yield f"supports duplicate edges in softmax alone, got {normalizer}"

    def compute(self, inputs: Inputs) -> Tensor:
        return reference_attention(inputs)


class Blockwise(Backend):
    """The kernel for any score in blocks of queries, without memory of queries × keys: the backward
    computes all but a few blocks again.

    It computes in float32 (float64 if the inputs are).
    """

    name = "blockwise"
    has_all_derivatives = True
    has_sink = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        return empty_reasons(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        (output,) = in_blocks(inputs, _attended, skips=True)
        return output.to(inputs.query.dtype)


def _attended(block: Inputs, allowed: Tensor | None) -> tuple[Tensor]:
    scores = masked_scores(block, allowed)
    if block.sink is not None:
        return (F.dropout(softmax(scores, block.sink), block.dropout_p) @ block.value,)
    scores, dead = revived(scores)
    weights = F.dropout(scores.softmax(dim=-1), block.dropout_p)
    return ((weights @ block.value).masked_fill(dead, 0.0),)
