"""Checks of the inputs of graph layers: nodes, edges, edge features and those of self-loops."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, fx, nn

from attnkit.core.masks.edges import Edges, remembered_edges
from attnkit.core.operators.sparse import first_rows

Nodes = (
    Annotated[Tensor, "*batch nodes channels"]
    | tuple[
        Annotated[Tensor, "*batch sources source_channels"],
        Annotated[Tensor, "*batch targets target_channels"] | None,
    ]
)
"""Features of the nodes, or a pair of those of sources and of targets (None: targets have none).
All items of a batch [batch, nodes, channels] share one graph."""

Size = tuple[int | None, int | None]
"""The number of sources and of targets; None: not known."""


def sources_and_targets(
    x: Nodes, edge_index: Tensor | Edges, size: Size | None
) -> tuple[Tensor, Tensor]:
    """Return the features of sources and targets, which may be one tensor.

    If x is one tensor and `Edges` has fewer targets than sources, the targets are its first rows.
    Targets without features are a tensor [targets, 0]; their number is that of `size` or of the
    edges, else that of the sources.

    Raises:
        TypeError: x is neither a tensor nor a pair.
        ValueError: features that are not tensors or have another shape, or numbers of nodes other
            than `size`.
    """
    if not isinstance(x, Tensor | tuple | list) or (not isinstance(x, Tensor) and len(x) != 2):
        raise TypeError(f"x: expected a tensor or a pair of tensors, got {type(x).__name__}")
    source, target = (x, x) if isinstance(x, Tensor) else x
    if isinstance(x, Tensor) and isinstance(edge_index, Edges) and x.ndim >= 2:
        targets, sources = edge_index.sizes
        if targets < sources == x.shape[-2]:
            target = first_rows(x, targets) if x.ndim == 2 else x[..., :targets, :]
    if isinstance(source, Tensor) and target is None:
        number = size[1] if isinstance(size, tuple | list) and len(size) == 2 else None
        if isinstance(edge_index, Edges):
            number = edge_index.sizes[0]
        elif isinstance(edge_index, Tensor) and edge_index.layout is not torch.strided:
            number = edge_index.shape[0]
        *batch, sources, _ = source.shape if source.ndim >= 2 else (0, 0)
        target = source.new_empty(*batch, sources if number is None else number, 0)
    for nodes in (source, target):
        is_dense = isinstance(nodes, Tensor) and nodes.layout is torch.strided
        if not isinstance(nodes, Tensor) or not 2 <= nodes.ndim <= 2 + is_dense:
            given = list(nodes.shape) if isinstance(nodes, Tensor) else type(nodes).__name__
            raise ValueError(f"x: expected [nodes, channels], got {given}")
    if source.shape[:-2] != target.shape[:-2]:
        raise ValueError(
            "x: expected sources and targets of one batch, "
            f"got {list(source.shape)} and {list(target.shape)}"
        )
    sizes = source.shape[-2], target.shape[-2]  # len() would be a constant in a trace
    if size is not None and not (
        isinstance(size, tuple | list)
        and len(size) == 2
        and all(given in (None, known) for given, known in zip(size, sizes, strict=True))
    ):
        raise ValueError(f"size: expected {sizes}, the sources and targets of x, got {size}")
    return source, target


def check_graph(
    source: Tensor,
    target: Tensor,
    edge_index: Tensor | Edges,
    edge_attr: Tensor | None,
    in_channels: tuple[int, int],
    edge_dim: int | None,
    needs_targets: bool,
) -> tuple[Edges, Tensor | None]:
    """Return the edges and the edge features [edges, edge_dim], checked.

    in_channels: expected channels of sources and targets. Unless `needs_targets`, targets may have
    no features.

    Raises:
        ValueError, TypeError: nodes, edges or features that do not fit.
    """
    for nodes, channels in zip((source, target), in_channels, strict=True):
        is_empty = nodes is target and nodes.shape[-1] == 0
        if is_empty and needs_targets:
            raise ValueError(
                f"x: expected [targets, {channels}], got None; targets without features are for "
                "the score 'gat', without gate and separate_self"
            )
        if nodes.shape[-1] != channels and not is_empty:
            raise ValueError(f"x: expected [nodes, {channels}], got {list(nodes.shape)}")
        if not nodes.is_floating_point():
            raise TypeError(f"x: expected a floating-point tensor, got {nodes.dtype}")
    edges = as_edges(edge_index, target.shape[-2], source.shape[-2])
    if edges.edge_index.device != source.device:
        raise ValueError(
            f"edge_index: expected the device of x, {source.device}, got {edges.edge_index.device}"
        )
    return edges, check_features(edge_attr, edges, edge_dim)


def check_features(
    edge_attr: Tensor | None, edges: Edges, edge_dim: int | None
) -> Annotated[Tensor, "edges edge_dim"] | None:
    """Return the edge features as [edges, edge_dim], or None if `edge_dim` is None.

    Raises:
        ValueError, TypeError: features that are missing, not expected, or of another shape or type.
    """
    if isinstance(edges, fx.Proxy):
        return edge_attr
    if edge_dim is None:
        if edge_attr is not None:
            raise ValueError(
                "edge_attr: expected None, since the layer has edge_dim=None, got features"
            )
        return None
    if edge_attr is None:
        raise ValueError(f"edge_attr: expected [edges, {edge_dim}], got None")
    return rows_of_edges("edge_attr", edge_attr, edges, "edge_dim", (edge_dim,))


def rows_of_edges(
    argument: str, rows: Tensor, edges: Edges, columns: str, widths: tuple[int, ...]
) -> Annotated[Tensor, "edges _"]:
    """Return features of edges as [edges, width], where the width is one of `widths`.

    A single column may omit its dimension.

    Raises:
        ValueError, TypeError: rows of another shape or type.
    """
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        given = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{argument}: expected a floating-point tensor, got {given}")
    if rows.ndim == 1:
        rows = rows[:, None]
    if list(rows.shape) not in [[edges.num_edges, width] for width in widths]:
        raise ValueError(
            f"{argument}: expected [edges, {columns}] = {[edges.num_edges, widths[0]]}, "
            f"got {list(rows.shape)}"
        )
    return rows


class EdgeModule(nn.Module):
    """A module that aggregates over edges, and whose call raises an error under PyG's `to_hetero`.

    It defines `__call__`, since PyG's tracer treats a module without one as a leaf.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_pyg_tracer(*args, *kwargs.values())
        return super().__call__(*args, **kwargs)


def as_edges(edge_index: Tensor | Edges, num_targets: int, num_sources: int | None = None) -> Edges:
    """Return the user's edges as `Edges` between so many nodes; `Edges` are returned unchanged."""
    num_sources = num_targets if num_sources is None else num_sources
    if isinstance(edge_index, fx.Proxy):
        refuse_pyg_tracer(edge_index)
        return edge_index  # each layer reads the edges of its edge type when it runs
    if not isinstance(edge_index, Edges):
        if not isinstance(edge_index, Tensor):
            raise TypeError(
                "edge_index: expected integers [2, edges], a sparse matrix or attnkit.Edges, "
                f"got {type(edge_index).__name__}"
            )
        return remembered_edges(edge_index, num_targets, num_sources)
    if edge_index.sizes != (num_targets, num_sources):
        raise ValueError(
            f"edge_index: expected {num_targets} targets and {num_sources} sources, as x has, "
            f"got Edges with {edge_index.sizes[0]} and {edge_index.sizes[1]}"
        )
    return edge_index


def refuse_pyg_tracer(*arguments: object) -> None:
    """Raise a TypeError if PyG's `to_hetero` traces the call.

    It would not sum over edge types, since it recognises only PyG's `MessagePassing` as a module
    that aggregates over edges.
    """
    for argument in arguments:
        if not isinstance(argument, fx.Proxy):
            continue
        if type(argument.tracer).__module__.partition(".")[0] == "torch_geometric":
            raise TypeError(
                "to_hetero: PyG's function does not sum attnkit's layers over edge types; "
                "use attnkit.interop.to_hetero with the same arguments"
            )


FillValue = float | Annotated[Tensor, "#edge_dim"] | Literal["mean", "add", "min", "max", "mul"]
"""Features of a self-loop: one number, a number for each channel, or the name of a reduction over
the features of the other edges into its node."""

_REDUCTIONS = {"mean": "mean", "add": "sum", "min": "amin", "max": "amax", "mul": "prod"}


def check_fill_value(fill_value: object, *, is_read: bool) -> None:
    """Raise a ValueError or TypeError if the fill value is invalid, or given but not read."""
    is_default = isinstance(fill_value, str) and fill_value == "mean"
    if not (is_read or is_default):
        raise ValueError(
            "fill_value: expected 'mean', the default, without add_self_loops=True and edge_dim, "
            f"got {fill_value!r}"
        )
    if isinstance(fill_value, str):
        if fill_value not in _REDUCTIONS:
            names = ", ".join(map(repr, _REDUCTIONS))
            raise ValueError(f"fill_value: expected a number or one of {names}, got {fill_value!r}")
    elif not isinstance(fill_value, int | float | Tensor):
        raise TypeError(f"fill_value: expected a number, tensor or name, got {fill_value!r}")


def looped_features(features: Tensor, looped: Edges, fill_value: FillValue) -> Tensor:
    """Return the edge features of `edges.with_loops`, given those of `edges` [edges, edge_dim]."""
    num_loops, edge_dim = min(looped.sizes), features.shape[1]
    assert looped.proper is not None
    proper = features[looped.proper]
    if isinstance(fill_value, str):
        empty = torch.ones if fill_value == "mul" else torch.zeros
        nodes = empty(looped.sizes[0], edge_dim, dtype=features.dtype, device=features.device)
        target = looped.edge_index[1, : proper.shape[0]].long()[:, None].expand(-1, edge_dim)
        loops = nodes.scatter_reduce(
            0, target, proper, _REDUCTIONS[fill_value], include_self=fill_value == "mul"
        )[:num_loops]
    else:
        row = torch.as_tensor(fill_value, dtype=features.dtype, device=features.device)
        if row.shape not in ((), (edge_dim,), (1, edge_dim)):
            raise ValueError(
                f"fill_value: expected one number for each of {edge_dim} channels, "
                f"got the shape {list(row.shape)}"
            )
        loops = row.expand(num_loops, edge_dim)
    return torch.cat([proper, loops])
