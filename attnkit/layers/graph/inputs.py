"""What graph layers are given: nodes, edges and what edges carry, checked against each other."""

from typing import Annotated

from torch import Tensor

from attnkit.core.masks.edges import Edges

Nodes = (
    Annotated[Tensor, "nodes channels"]
    | tuple[
        Annotated[Tensor, "sources source_channels"], Annotated[Tensor, "targets target_channels"]
    ]
)
"""Features of the nodes; or those of sources and of targets."""


def check_graph(
    x: Nodes,
    edge_index: Tensor | Edges,
    edge_attr: Tensor | None,
    in_channels: tuple[int, int],
    edge_dim: int | None,
) -> tuple[Tensor, Tensor, Edges, Tensor | None]:
    """Sources and targets, which may be one tensor, edges, and edge features [edges, edge_dim].

    in_channels: that sources and targets must have. ValueError or TypeError name what is wrong.
    """
    if not isinstance(x, Tensor | tuple | list) or (not isinstance(x, Tensor) and len(x) != 2):
        raise TypeError(f"x: expected a tensor or a pair of tensors, got {type(x).__name__}")
    source, target = (x, x) if isinstance(x, Tensor) else x
    for nodes, channels in zip((source, target), in_channels, strict=True):
        if not isinstance(nodes, Tensor) or nodes.ndim != 2 or nodes.shape[1] != channels:
            given = list(nodes.shape) if isinstance(nodes, Tensor) else type(nodes).__name__
            raise ValueError(f"x: expected [nodes, {channels}], got {given}")
        if not nodes.is_floating_point():
            raise TypeError(f"x: expected a floating-point tensor, got {nodes.dtype}")
    edges = as_edges(edge_index, target.shape[0], source.shape[0])
    if edges.edge_index.device != source.device:
        raise ValueError(f"edge_index: is on {edges.edge_index.device}, x is on {source.device}")
    if edge_dim is None:
        if edge_attr is not None:
            raise ValueError("edge_attr: given, but edge_dim is None: the layer reads none")
        return source, target, edges, None
    if edge_attr is None:
        raise ValueError(f"edge_attr: expected [edges, {edge_dim}], got None")
    if edge_attr.ndim == 1:
        edge_attr = edge_attr[:, None]
    if list(edge_attr.shape) != [edges.num_edges, edge_dim]:
        raise ValueError(
            f"edge_attr: expected [edges, edge_dim] = {[edges.num_edges, edge_dim]}, "
            f"got {list(edge_attr.shape)}"
        )
    if not edge_attr.is_floating_point():
        raise TypeError(f"edge_attr: expected a floating-point tensor, got {edge_attr.dtype}")
    return source, target, edges, edge_attr


def as_edges(edge_index: Tensor | Edges, num_targets: int, num_sources: int | None = None) -> Edges:
    """`Edges` between so many nodes, from what users pass; those that are already are kept."""
    num_sources = num_targets if num_sources is None else num_sources
    if not isinstance(edge_index, Edges):
        if not isinstance(edge_index, Tensor):
            raise TypeError(
                "edge_index: expected integers [2, edges], a sparse matrix or attnkit.Edges, "
                f"got {type(edge_index).__name__}"
            )
        return Edges(edge_index, num_targets, num_sources)
    if edge_index.sizes != (num_targets, num_sources):
        raise ValueError(
            f"edge_index: Edges has {edge_index.sizes[0]} targets and {edge_index.sizes[1]} "
            f"sources, x has {num_targets} and {num_sources}"
        )
    return edge_index
