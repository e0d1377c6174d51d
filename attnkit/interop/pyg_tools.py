"""attnkit's graph models under PyG's explainers and its `to_hetero`."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from attnkit.core.masks.edges import Edges, in_callers_order
from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.heads import NodeHeads
from attnkit.layers.graph.inputs import looped_features
from attnkit.layers.graph.typed_edges import as_metadata

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


if TYPE_CHECKING:
    from torch_geometric.typing import Metadata


def to_hetero(
    model: nn.Module,
    metadata: Metadata,
    aggr: str = "sum",
    input_map: dict[str, str] | None = None,
    debug: bool = False,
) -> fx.GraphModule:
    """Apply `torch_geometric.nn.to_hetero` to a model with `GraphAttention`, or to `attnkit.GAT`.

        model = attnkit.GAT((-1, -1), 64, 4, add_self_loops=False)
        model = interop.to_hetero(model, data.metadata())
        logits = model(data.x_dict, data.edge_index_dict)  # by node type

    Each attention is copied for each edge type, every other layer for each node type, and what a
    node gets from its edge types is summed (Schlichtkrull et al., Modeling Relational Data with
    Graph Convolutional Networks, 2018). PyG's own function takes only subclasses of its
    `MessagePassing` for layers that aggregate over edges; with `GraphAttention` it would give one
    output for each edge type, and ends in a TypeError that names this function. This one also
    converts inside your own modules that hold attention. Layers of PyG are converted as by PyG.

    Args:
        model: its `forward` takes nodes, edges as a tensor, and edge features; arguments for edges
            have "edge" or "adj" in their names.
        metadata: node types and edge types, as `HeteroData.metadata()` gives them, or a JSON file.
        aggr, input_map, debug: as in PyG's function.

    Returns:
        A model that takes and returns a dict in place of each tensor.

    Raises:
        ValueError: the model has no `GraphAttention`; its `forward` branches or loops over values
            of a tensor, which torch.fx cannot trace; a layer adds self-loops, and an edge type
            joins two node types; or metadata have another form.
    """
    if not any(isinstance(module, GraphAttention) for module in model.modules()):
        raise ValueError(f"model: {type(model).__name__} has no GraphAttention")
    make = _transformer_class()
    hetero = make(model, as_metadata(metadata), aggr, input_map, debug).transform()
    for part in hetero.modules():
        if type(part) in (nn.Module, nn.ModuleDict, nn.ModuleList):  # created for the copies
            part.training = model.training
    return hetero


@cache
def _transformer_class() -> Any:
    from torch_geometric.nn import MessagePassing
    from torch_geometric.nn.to_hetero_transformer import ToHeteroTransformer

    def aggregates(module: nn.Module) -> bool:
        return isinstance(module, GraphAttention | MessagePassing)

    def is_leaf(module: nn.Module) -> bool:
        is_container = isinstance(module, nn.Sequential) or any(map(aggregates, module.modules()))
        return aggregates(module) or not is_container

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return is_leaf(m)

    class Transformer(ToHeteroTransformer):
        """PyG's transformer, for which `GraphAttention` aggregates over edges, too."""

        def __init__(self, module: nn.Module, *args: Any) -> None:
            super().__init__(nn.Identity(), *args)  # it would trace as if all modules were leaves
            try:
                graph = Tracer().trace(module)
            except fx.proxy.TraceError as error:
                reason = str(error).partition(". ")[0]
                raise ValueError(
                    f"model: {type(module).__name__} cannot be traced by torch.fx: {reason}"
                ) from None
            for node in graph.nodes:
                node.type = None  # the generated code could not name Annotated[Tensor, …]
            self.module, self.gm = module, fx.GraphModule(module, graph)

        def is_attention(self, node: fx.Node) -> bool:
            return node.op == "call_module" and isinstance(
                self.module.get_submodule(str(node.target)), GraphAttention
            )

        def has_edge_level_arg(self, node: fx.Node) -> bool:
            return not self.is_attention(node) and super().has_edge_level_arg(node)

        def has_node_level_arg(self, node: fx.Node) -> bool:
            return self.is_attention(node) or super().has_node_level_arg(node)

        def call_module(self, node: fx.Node, target: Any, name: str) -> None:
            if self.is_attention(node):
                self.call_message_passing_module(node, target, name)
            else:
                super().call_module(node, target, name)

        def _init_submodule(self, module: nn.Module, target: str) -> nn.Module:
            if is_leaf(module) or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
                return super()._init_submodule(module, target)
            container = nn.Module()
            for name, child in module.named_children():
                container.add_module(name, self._init_submodule(child, f"{target}.{name}"))
            return container

    return Transformer
