"""Features of added self-loops.

`Edges.with_loops` has the caller's edges without self-loops, then one self-loop for each node.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from attnkit.core.masks.edges import Edges

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
