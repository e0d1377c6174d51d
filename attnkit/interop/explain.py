"""attnkit's graph models under PyG's explainers."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.masks.edges import Edges, in_callers_order
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.heads import NodeHeads
from attnkit.layers.graph.inputs import looped_features

Model = TypeVar("Model", bound=nn.Module)


def explainable(model: Model) -> Model:
    """Return a copy of the model, with the same parameters, that PyG's explainers can read.

        explainer = Explainer(interop.explainable(model), algorithm=GNNExplainer(), …)

    Explainers use the `MessagePassing` modules of a model: they mask the messages of edges
    (`GNNExplainer`, `PGExplainer`, `CaptumExplainer`), read attention from them
    (`AttentionExplainer`) and count them as hops. In the copy each `GraphAttention` sums its
    messages weight · (W_v x_j + W_e e_ij) by such a module: the output is the same, but it takes
    memory of edges × channels, so that it is for explaining and not for training. Call the model
    with the graph's `edge_index`, not with `Edges`, as explainers do. `GraphMaskExplainer`, which
    rewrites the forward of each layer, is not supported.

    Unlike with PyG's layers, `AttentionExplainer` reads the weights of the right edges if the graph
    has self-loops and the layer replaces them by its own.

    Raises:
        ValueError: the model has no `GraphAttention`.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    layers = [module for module in model.modules() if type(module) is GraphAttention]
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no GraphAttention")
    for layer in layers:
        layer.__class__ = _ExplainedAttention
        layer.messages = _messages_class()().train(layer.training)
    return model


class _ExplainedAttention(GraphAttention):
    """A `GraphAttention` whose sums are computed by PyG."""

    messages: nn.Module

    def _attend(
        self, nodes: NodeHeads, edges: Edges, features: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        weights = self._weights(nodes, *self._graph(edges, features, bias))
        edge_index, edge_value = edges.edge_index, None
        if self.add_self_loops:
            weights = in_callers_order(weights, edges.with_loops)
            loops = torch.arange(min(edges.sizes), device=edge_index.device).expand(2, -1)
            edge_index = torch.cat([edge_index, loops.to(edge_index.dtype)], dim=1)
            if features is not None:
                looped = looped_features(features, edges.with_loops, self.fill_value)
                features = in_callers_order(looped, edges.with_loops)
        if features is not None:
            weight = self.projections.edge_features(features).value_weight
            if weight is not None:
                edge_value = (features.to(weight.dtype) @ weight.transpose(1, 2)).transpose(0, 1)
        output = self.messages(
            edge_index,
            value=nodes.value.transpose(0, 1),
            alpha=F.dropout(weights, self.dropout_p, self.training),
            edge_value=edge_value,
            size=edges.sizes[::-1],
        )
        return output.unflatten(1, (self.heads, -1)).transpose(0, 1)


@cache
def _messages_class() -> Any:
    from torch_geometric.nn import MessagePassing

    class Messages(MessagePassing):
        """Σ_e alpha_e (value_j + edge_value_e), with the hooks and masks of PyG."""

        def __init__(self) -> None:
            super().__init__(aggr="sum", node_dim=0)

        def forward(self, edge_index, value, alpha, edge_value, size):
            sums = self.propagate(
                edge_index, size=size, value=(value, None), alpha=alpha, edge_value=edge_value
            )
            return sums.flatten(1)  # PGExplainer expects nodes × channels

        def message(self, value_j, alpha, edge_value):
            value = value_j if edge_value is None else value_j + edge_value
            return alpha[:, :, None] * value

        def explain_message(self, inputs: Tensor) -> Tensor:
            mask = self._edge_mask
            mask = mask.sigmoid() if self._apply_sigmoid else mask
            # self-loops that the layer added come last and are not explained
            mask = torch.cat([mask, mask.new_ones(len(inputs) - len(mask))])
            return inputs * mask[:, None, None]

    return Messages
