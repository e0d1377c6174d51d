"""One attention over the edges of a graph that ran."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.edges.weights import edge_weights
from attnkit.core.masks.edges import EdgeFeatures, Edges, in_callers_order


@dataclass(eq=False)
class EdgeCall:
    """One attention over the edges of a graph that ran.

    A layer that adds self-loops replaces those it is given: in their rows the weights are 0.

    layer, tap: as of `AttentionCall`; taps are "attend" and "pyg".
    edge_index: the edges in the caller's order, sources in row 0 and targets in row 1; self-loops
        that the layer added come last.
    is_added_loop: which of them the layer added.
    num_nodes: of sources and of targets.
    weights: before dropout, without gradients.
    seen_in: what autograd can differentiate by: the weights themselves, of torch_geometric's
        convolutions; the output [1, heads, targets, value_dim], of `attend`.
    value: what is averaged; None where `seen_in` is the weights.
    edge_features: what edges add to the values, in the order of `edge_index`.
    edge_type: of a heterogeneous convolution, which calls each of its types.
    """

    layer: str
    tap: str
    edge_index: Annotated[Tensor, "2 edges", int]
    is_added_loop: Annotated[Tensor, "edges", bool]
    num_nodes: tuple[int, int]
    weights: Annotated[Tensor, "edges heads"]
    seen_in: Tensor
    value: Annotated[Tensor, "heads sources value_dim"] | None = None
    edge_features: EdgeFeatures | None = None
    edge_type: tuple[str, str, str] | None = None

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]

    @property
    def is_replaced(self) -> Annotated[Tensor, "edges", bool]:
        """The caller's self-loops, if the layer put its own in their place."""
        is_loop = self.edge_index[0] == self.edge_index[1]
        return is_loop & ~self.is_added_loop & self.is_added_loop.any()

    def weight_gradient(self, gradient: Tensor) -> Annotated[Tensor, "edges heads"]:
        """∂y/∂α of each edge and head; 0 for a self-loop that the layer replaced.

            ∂y/∂α_e = ∂y/∂output_i · (value_j + W_v e_ij)    for the edge e from j to i

        Args:
            gradient: `torch.autograd.grad(y, call.seen_in)`.

        Raises:
            ValueError: a gradient of another shape.
        """
        if gradient.shape != self.seen_in.shape:
            raise ValueError(
                f"gradient: expected that of `seen_in` of the layer {self.layer!r}, "
                f"{list(self.seen_in.shape)}, got {list(gradient.shape)}"
            )
        if self.value is None:
            return gradient
        source, target = self.edge_index
        by_target, value = gradient[0], self.value.detach()
        result = torch.empty_like(self.weights)
        features = self.edge_features
        for head in range(self.num_heads):
            received = by_target[head]
            result[:, head] = (received[target] * value[head][source]).sum(dim=1)
            if features is not None and features.value_weight is not None:
                assert features.features is not None
                along = received @ features.value_weight[head]
                result[:, head] += (along[target] * features.features).sum(dim=1)
        return result.masked_fill(self.is_replaced[:, None], 0.0).detach()


def is_of_edges(inputs: Inputs, *, is_batched: bool) -> bool:
    """Whether attention is that of a graph's edges, which an `EdgeCall` tells."""
    is_softmax = type(inputs.normalizer).__name__ == "Softmax"
    return isinstance(inputs.mask, Edges) and is_softmax and inputs.bias is None and not is_batched


def edge_call(layer: str, inputs: Inputs, output: Tensor) -> EdgeCall:
    """The call of `attend(…, mask=edges)` with tensors that lack the batch."""
    edges, features = inputs.mask, inputs.edge_features
    assert isinstance(edges, Edges)
    with torch.no_grad():
        weights = edge_weights(
            inputs.query[0],
            inputs.key[0],
            edges,
            score=inputs.score,
            edge_features=features,
        ).T
        value = inputs.repeated_heads()[1][0]
    callers = edges.looped_from or edges
    if edges.looped_from is not None:
        weights = in_callers_order(weights, callers)
        if features is not None:
            rows = features.features
            rows = None if rows is None else in_callers_order(rows, callers)
            features = EdgeFeatures(rows, features.key_weight, features.value_weight)
    added = edges.edge_index[:, len(callers.without_loops) :] if edges.looped_from else None
    edge_index = callers.edge_index
    if added is not None:
        edge_index = torch.cat([edge_index, added], dim=1)
    places = torch.arange(edge_index.shape[1], device=edge_index.device)
    targets, sources = edges.sizes
    return EdgeCall(
        layer=layer,
        tap="attend",
        edge_index=edge_index,
        is_added_loop=places >= callers.num_edges,
        num_nodes=(sources, targets),
        weights=weights,
        seen_in=output,
        value=value,
        edge_features=features,
    )
