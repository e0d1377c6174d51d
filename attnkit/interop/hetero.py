"""PyG's `to_hetero` for models of attnkit's graph layers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from attnkit.layers.graph.attention import GraphAttention
from attnkit.layers.graph.typed_edges import as_metadata

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
