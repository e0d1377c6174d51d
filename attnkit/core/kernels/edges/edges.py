"""Attention over the edges of a graph, by torch's operators: what it serves, and when it pays."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs, in_high_precision
from attnkit.core.kernels.base import Backend, empty_reasons, functorch_reasons
from attnkit.core.kernels.edges.lanes import as_lanes
from attnkit.core.kernels.edges.operator import traced_softmax
from attnkit.core.kernels.edges.softmax import EdgeSoftmax
from attnkit.core.masks.edges import Edges
from attnkit.core.precision import no_autocast
from attnkit.core.scores.additive import Additive
from attnkit.core.scores.kinds import Cosine, Gaussian

DENSITY = 16  # products of a full matrix that take as long as one that is sampled

_IS_COUNTED = ContextVar("_IS_COUNTED", default=False)


@contextmanager
def by_operators() -> Iterator[None]:
    """In the block torch's operators compute edges, which torch can count as it cannot others."""
    token = _IS_COUNTED.set(True)
    try:
        yield
    finally:
        _IS_COUNTED.reset(token)


def computes_by_operators() -> bool:
    """Whether this is such a block."""
    return _IS_COUNTED.get()


class EdgesKernel(Backend):
    """`Edges`, in time and memory linear in the edges, by torch's operators."""

    name = "edges"
    needs_mask = "mask=Edges(…) and no other mask"
    reads_edges = True

    def reasons(self, inputs: Inputs) -> Iterator[str]:
        if not isinstance(inputs.mask, Edges):
            if inputs.mask is not None:
                yield f"needs {self.needs_mask}"
            return
        yield from empty_reasons(inputs)
        score, features = inputs.score, inputs.edge_features
        edges = inputs.mask.edge_index.device
        if edges != inputs.query.device:
            yield f"needs edges on {inputs.query.device}, as the tensors, got {edges}"
        if inputs.dot_dim is None and not isinstance(score, Additive):
            yield f"needs a dot-product score or Additive, got {score}"
        if score.softcap is not None:
            yield f"cannot compute a softcap, got {score.softcap}"
        if inputs.bias is not None:
            yield "cannot read a bias"
        if torch.compiler.is_exporting():
            yield "sorts edges by their values, which an exported program cannot"
        yield from functorch_reasons()
        reads_features = features is not None and features.key_weight is not None
        if reads_features and isinstance(score, Cosine | Gaussian):
            yield f"cannot read edge features inside the score {score}"

    def pays(self, inputs: Inputs) -> bool:
        assert isinstance(inputs.mask, Edges)
        if inputs.edge_features is not None or torch.compiler.is_compiling():
            return True  # torch.compile cannot ask whether an edge is given twice
        return inputs.mask.num_edges * DENSITY < inputs.num_queries * inputs.num_keys

    def compute(self, inputs: Inputs) -> Tensor:
        with no_autocast(inputs.query):
            exact = in_high_precision(inputs)
            plan, lanes = as_lanes(exact)
            softmax = traced_softmax if torch.compiler.is_compiling() else EdgeSoftmax.apply
            output = with_feature_values(exact, *softmax(plan, *lanes))
        return output.to(inputs.query.dtype)


def with_feature_values(inputs: Inputs, output: Tensor, sums: Tensor) -> Tensor:
    """The output [batch, heads, targets, value_dim], from that of all lanes and their weighted sums
    of features."""
    output = output.unflatten(0, inputs.query.shape[:2])
    features = inputs.edge_features
    if features is None or features.value_weight is None:
        return output
    sums = sums.unflatten(0, inputs.query.shape[:2])
    return output + sums @ features.value_weight.transpose(1, 2)
