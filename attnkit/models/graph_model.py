"""The base class of graph models: readouts of nodes, graphs or pairs, and networks in hops."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, fx, nn

from attnkit.core.arguments import choice
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.sequences import Packed
from attnkit.layers.graph.inputs import EdgeModule
from attnkit.layers.graph.receptive_field import ReceptiveField
from attnkit.layers.pooling import AttentionPool


class Hops(NamedTuple):
    """The computation of a network, divided at its layers of attention.

        x = before(x)
        x = hop(x, edges)           for each hop
        logits = after(x)

    `before` and `after` treat each node alone, so that any part of a graph can be computed on its
    own: for `Edges` with fewer targets than sources a hop returns the targets, which come first.
    In a network that reads edge features, a hop takes them after the edges.
    """

    before: Callable[[Tensor], Tensor]
    each: Sequence[Callable[..., Tensor]]
    after: Callable[[Tensor], Tensor]


ReadOut = Literal["node", "graph", "edge"]
Pool = Literal["attention", "mean", "sum", "max"]


class GraphPool(AttentionPool):
    """One vector for each graph: attention pooling of graphs packed one after the other.

        pooled_g = attention(query, x_i of graph g)

    Nodes [nodes, dim] in, [graphs, dim] out. A graph without nodes gives the bias of the output.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Pool the nodes of each graph; `lengths` is the number of nodes of each graph, in their
        order; None: one graph."""
        if lengths is None:
            lengths = torch.tensor([x.shape[0]], device=x.device)
        return super().forward(x[None], Packed(torch.ones_like(lengths), lengths))


class PlainPool(nn.Module):
    """PyG's `global_mean_pool`, `global_add_pool` or `global_max_pool`, called like `GraphPool`.

    A graph without nodes in a batch gives 0.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.reduce = "amax" if pool == "max" else pool

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            if not x.shape[0]:
                return x.new_zeros(1, x.shape[1])
            return getattr(x, self.reduce)(dim=0, keepdim=True)
        index = torch.repeat_interleave(lengths, output_size=x.shape[0]).to(x.device)
        empty = x.new_zeros(len(lengths), x.shape[1])
        index = index[:, None].expand_as(x)
        return empty.scatter_reduce(0, index, x, self.reduce, include_self=False)


class GraphModel(EdgeModule):
    """Base class of graph models, whose last linear layer reads what `readout` selects.

        "node"      x_i, for each node
        "graph"     pool(x_i of the graph), for each graph
        "edge"      [x_i, x_j], for each pair of nodes

    A subclass calls `_reads` in its constructor, `_sizes_of_graphs` before it computes or draws
    anything, and `_read` before its last linear layer.
    """

    takes_edges = True
    """Whether `edge_index` may be `attnkit.Edges`."""

    readout: ReadOut
    pool: nn.Module | None

    def _reads(self, readout: ReadOut, pool: Pool, dim: int, heads: int, backend: str) -> int:
        """Set `readout` and `pool`, and return the number of channels of the last linear layer.

        Args:
            pool: "attention" for a `GraphPool` with `heads` heads, else a `PlainPool`.

        Raises:
            ValueError: an unknown choice, or a pool with a readout that does not pool.
        """
        choice(get_args(ReadOut), readout=readout)
        choice(get_args(Pool), pool=pool)
        if pool != "attention" and readout != "graph":
            raise ValueError(
                f"pool: only the readout 'graph' pools, expected 'attention', the default, "
                f"got {pool!r} with the readout {readout!r}"
            )
        self.readout, self.pool = readout, None
        if readout == "graph":
            learned = pool == "attention"
            self.pool = GraphPool(dim, heads, backend=backend) if learned else PlainPool(pool)
        return dim * (1 + (readout == "edge"))

    def _sizes_of_graphs(
        self,
        x: Tensor,
        edge_index: Tensor | Edges | ReceptiveField,
        batch: Tensor | None,
        num_graphs: int | None,
        pairs: Tensor | None,
    ) -> Tensor | None:
        """Return the number of nodes of each graph; None without `batch`: there is one graph.

        Raises:
            ValueError, TypeError, IndexError: arguments of the model's `forward` that do not fit
                its nodes or its readout.
        """
        if self.readout != "node" and isinstance(x, fx.Proxy):
            raise ValueError(f"to_hetero: expected the readout 'node', got {self.readout!r}")
        if isinstance(x, fx.Proxy):
            return None
        if self.readout != "node" and isinstance(edge_index, ReceptiveField):
            raise ValueError(
                "edge_index: a receptive field is for the readout 'node', got the readout "
                f"{self.readout!r}: expected all edges"
            )
        if (pairs is None) != (self.readout != "edge"):
            given = None if pairs is None else list(pairs.shape)
            raise ValueError(f"pairs: only for the readout 'edge', got {given} in {self.readout!r}")
        if pairs is not None:
            check_pairs(pairs, x.shape[0])
        if batch is not None:
            return graph_lengths(batch, num_graphs, num_nodes=x.shape[0])
        if num_graphs not in (None, 1):
            raise ValueError(f"num_graphs: {num_graphs} need batch, the graph of each node")
        return None

    def _read(self, x: Tensor, lengths: Tensor | None, pairs: Tensor | None) -> Tensor:
        """Return the input of the last linear layer, from the nodes [nodes, dim]."""
        if self.pool is not None:
            return self.pool(x, lengths)
        if self.readout == "edge" and pairs is not None:
            return torch.cat([x[pairs[0]], x[pairs[1]]], dim=1)
        return x


def check_pairs(pairs: Tensor, num_nodes: int) -> None:
    """Raise TypeError, ValueError or IndexError unless `pairs` is integers [2, pairs] of nodes."""
    is_tensor = isinstance(pairs, Tensor)
    if not is_tensor or pairs.dtype in (torch.bool, torch.uint8) or pairs.is_floating_point():
        given = pairs.dtype if is_tensor else type(pairs).__name__
        raise TypeError(f"pairs: expected integers [2, pairs], got {given}")
    if pairs.ndim != 2 or pairs.shape[0] != 2:
        hint = ", transposed?" if pairs.ndim == 2 and pairs.shape[1] == 2 else ""
        raise ValueError(f"pairs: expected the shape [2, pairs], got {list(pairs.shape)}{hint}")
    if not torch.compiler.is_compiling() and pairs.numel() and not pairs.is_meta:
        low, high = (int(bound) for bound in pairs.aminmax())
        if low < 0 or high >= num_nodes:
            raise IndexError(f"pairs: go from {low} to {high}, expected nodes 0 to {num_nodes - 1}")


def graph_lengths(
    batch: Tensor, num_graphs: int | None = None, *, num_nodes: int | None = None
) -> Tensor:
    """Return the number of nodes of each graph, from PyG's `batch` [nodes], each node's graph.

    Raises:
        TypeError: `batch` has no integers.
        ValueError: the nodes are not sorted by graph, are not `num_nodes`, or belong to more than
            `num_graphs` graphs.
    """
    if num_nodes is not None and list(batch.shape) != [num_nodes]:
        raise ValueError(f"batch: expected [{num_nodes} nodes], as x has, got {list(batch.shape)}")
    if batch.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"batch: expected integers [nodes], got {batch.dtype}")
    if len(batch) > 1 and not bool((batch[1:] >= batch[:-1]).all()):
        raise ValueError("batch: expected nodes in the order of their graphs")
    lengths = torch.bincount(batch, minlength=num_graphs or 0)
    if num_graphs is not None and len(lengths) > num_graphs:
        raise ValueError(f"num_graphs: batch has {len(lengths)}, got {num_graphs}")
    return lengths
