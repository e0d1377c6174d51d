"""Storage of many graphs, from which batches are cut by ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch_geometric.data import Data

from attnkit.core.operators.sparse import offsets, ranges
from attnkit.lightning.errors import UserError
from attnkit.tasks.graphs.base import (
    CARRIED,
    Target,
    check_finite,
    checked_values,
    has_target,
    node_targets,
)
from attnkit.tasks.loaders import BatchItems


@dataclass(eq=False)
class Graphs:
    """Graphs stored in sequence: the nodes of graph i are x[node_starts[i]:node_starts[i + 1]].

    x: [nodes, channels], the features of the nodes of all graphs.
    edge_index: int64 [2, edges], source in row 0, as numbers of the nodes of all graphs; the edges
        of a graph are together, in the order of the graphs.
    node_starts, edge_starts: int64 [graphs + 1].
    y: int64 [graphs], classes, or float32 [graphs, outputs]; −1 and NaN: unknown. With `of_nodes`
        it has a row for each node, [nodes] or [nodes, outputs].
    edge_attr: float32 [edges, channels], or None.
    edge_weight: float32 [edges], or None.
    of_nodes: whether y is that of nodes, not of graphs.
    """

    x: Tensor
    edge_index: Tensor
    node_starts: Tensor
    edge_starts: Tensor
    y: Tensor
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None
    of_nodes: bool = False

    @classmethod
    def of(
        cls,
        graphs: Iterable[Data],
        target: Target | None,
        place_of: Callable[[int], str] | None = None,
        *,
        of_nodes: bool = False,
    ) -> Graphs:
        """Return the storage of graphs with x, edge_index, y and optional attributes of edges.

        Args:
            graphs: objects `torch_geometric.data.Data`; the target of one without y is unknown.
            target: the kind of y; None: it is not read.
            place_of: returns where a graph comes from, for messages.
            of_nodes: whether y is that of nodes, not of graphs.

        Raises:
            UserError: a graph is malformed; the message names the first one.
        """
        place_of = place_of or "data: graph {}".format
        found = list(graphs)
        if not found:
            raise UserError("data: there are no graphs")
        carried = [name for name in CARRIED if getattr(found[0], name, None) is not None]
        for number, graph in enumerate(found):
            if wrong := _fault(graph, found[0], carried):
                raise UserError(f"{place_of(number)}: {wrong}")
        node_starts = offsets(torch.tensor([graph.x.shape[0] for graph in found]))
        edges = [graph.edge_index for graph in found]
        edge_starts = offsets(torch.tensor([one.shape[1] for one in edges]))
        moved = [one + start for one, start in zip(edges, node_starts.tolist(), strict=False)]
        x = torch.cat([graph.x for graph in found]).float()
        owners = torch.repeat_interleave(node_starts.diff())
        check_finite(
            x,
            lambda node: (
                f"{place_of(int(owners[node]))}: "
                f"x of its node {node - int(node_starts[owners[node]])}"
            ),
        )
        extra = {name: torch.cat([graph[name] for graph in found]).float() for name in carried}
        if "edge_attr" in extra:
            extra["edge_attr"] = extra["edge_attr"].view(len(extra["edge_attr"]), -1)
        if "edge_weight" in extra:
            extra["edge_weight"] = extra["edge_weight"].flatten()
        targets = [None if target is None else graph.get("y") for graph in found]
        sizes = node_starts.diff().tolist() if of_nodes else None
        y = joined_targets(targets, target or "classes", place_of, sizes)
        edge_index = torch.cat(moved, dim=1).long()
        return cls(x, edge_index, node_starts, edge_starts, y, **extra, of_nodes=of_nodes)

    def __len__(self) -> int:
        return len(self.node_starts) - 1

    @property
    def sizes(self) -> Tensor:
        """Number of nodes of each graph, int64 [graphs]."""
        return self.node_starts.diff()

    @property
    def has_target(self) -> Tensor:
        """Whether each graph has a known target, or a node with one, bool [graphs]."""
        known = has_target(self.y)
        if not self.of_nodes:
            return known
        owners = torch.repeat_interleave(self.sizes)
        return torch.zeros(len(self)).index_add_(0, owners, known.float()) > 0

    def targets(self, numbers: Tensor) -> Tensor:
        """Return y of the graphs with these numbers, or of their nodes."""
        if not self.of_nodes:
            return self.y[numbers]
        return self.y[ranges(self.node_starts[numbers], self.sizes[numbers])]

    def batch(self, numbers: Tensor) -> Data:
        """Return the graphs with these numbers as one graph without edges between them.

        Returns:
            x, edge_index, edge_attr and edge_weight (if known), `y` of the graphs or nodes, `batch`
            [nodes], the position of each node's graph, `ptr` [graphs + 1], the first node of each
            graph, and `number` [graphs].
        """
        node_counts = self.node_starts.diff()[numbers]
        edge_counts = self.edge_starts.diff()[numbers]
        nodes = ranges(self.node_starts[numbers], node_counts)
        edges = ranges(self.edge_starts[numbers], edge_counts)
        ptr = offsets(node_counts)
        shift = (ptr[:-1] - self.node_starts[numbers]).repeat_interleave(edge_counts)
        data = Data(
            x=self.x[nodes],
            edge_index=self.edge_index[:, edges] + shift,
            y=self.y[nodes if self.of_nodes else numbers],
            batch=torch.repeat_interleave(node_counts),
            ptr=ptr,
            number=numbers,
        )
        for name in CARRIED:
            if (values := getattr(self, name)) is not None:
                data[name] = values[edges]
        return data


class GraphItems(BatchItems):
    """Data set of some of the graphs, fetched by the batch.

    Args:
        graphs: all graphs.
        numbers: int64 [graphs], the numbers of the graphs in this set.
        batch_tokens: nodes in a batch, for `TokenSampler`; None: batches are counted in graphs.
    """

    def __init__(self, graphs: Graphs, numbers: Tensor, batch_tokens: int | None = None) -> None:
        self.graphs = graphs
        self.numbers = numbers
        self.batch_tokens = batch_tokens

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def sizes(self) -> Tensor:
        """Number of nodes of each graph, int64 [graphs]."""
        return self.graphs.sizes[self.numbers]

    def __getitems__(self, numbers: Sequence[int] | Sequence[list[int]]) -> Data:
        """Return one batch of the items with these numbers, or with those of a `TokenSampler`."""
        flat = torch.tensor(numbers, dtype=torch.int64).flatten()
        return self.graphs.batch(self.numbers[flat])


def joined_targets(
    found: Sequence[Tensor | None],
    target: Target,
    place_of: Callable[[int], str],
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return the targets of all graphs as one tensor (see `Graphs.y`), after checking them.

    Args:
        found: y of each graph; None: unknown.
        target: the kind of y.
        place_of: returns where a graph comes from, for messages.
        sizes: numbers of nodes of the graphs, if y is that of nodes.

    Raises:
        UserError: y of a graph is no such target.
    """
    rows: list[Tensor | None] = []
    width: int | None = None
    for number, y in enumerate(found):
        where = place_of(number)
        if y is None:
            rows.append(None)
            continue
        if not isinstance(y, Tensor):
            raise UserError(f"{where}: expected y as a tensor, got {type(y).__name__}")
        place = partial(("{}" if sizes is None else "{}: node {}").format, where)
        if sizes is not None:
            y = node_targets(y, target, sizes[number], where, place)
        elif target != "classes":
            y = checked_values(y.reshape(1, -1).float(), target, place)
        elif y.numel() != 1 or y.is_floating_point():
            raise UserError(
                f"{where}: expected y to be one class, an integer, got {y.dtype} "
                f"{list(y.shape)}; data.target says what it is: classes, labels, numbers"
            )
        else:
            y = y.reshape(1)
        if y.ndim == 2 and width not in (None, y.shape[1]):
            raise UserError(f"{where}: expected {width} {target}, as before, got {y.shape[1]}")
        width = y.shape[1] if y.ndim == 2 else None
        rows.append(y if y.is_floating_point() else y.long())
    unknown = torch.tensor(-1) if target == "classes" else torch.full((width or 0,), torch.nan)
    counts = sizes or [1] * len(found)
    return torch.cat(
        [
            unknown.expand(count, *unknown.shape) if y is None else y
            for y, count in zip(rows, counts, strict=True)
        ]
    )


def _fault(graph: Data, first: Data, carried: Sequence[str]) -> str:
    """Return what is wrong with a graph, or an empty text."""
    if not isinstance(graph, Data):
        return f"expected a Data, got {type(graph).__name__}"
    x, edge_index = graph.get("x"), graph.get("edge_index")
    if not isinstance(x, Tensor) or x.ndim != 2:
        got = "none" if x is None else list(getattr(x, "shape", [type(x).__name__]))
        return f"expected x [nodes, channels], got {got}"
    if not len(x):
        return "it has no nodes"
    if x.shape[1] != first.x.shape[1]:
        return f"expected {first.x.shape[1]} features of a node, as before, got {x.shape[1]}"
    if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or len(edge_index) != 2:
        got = "none" if edge_index is None else list(getattr(edge_index, "shape", []))
        return f"expected edge_index [2, edges], got {got}"
    if edge_index.dtype not in (torch.int32, torch.int64):
        return f"expected edge_index of int64 or int32, got {edge_index.dtype}"
    outside = (edge_index < 0) | (edge_index >= len(x))
    if outside.any():
        edge = int(outside.any(dim=0).nonzero()[0])
        ends = edge_index[:, edge].tolist()
        return f"edge {edge} joins {ends[0]} and {ends[1]}, expected nodes 0 to {len(x) - 1}"
    for name in CARRIED:
        values = graph.get(name)
        if (values is not None) != (name in carried):
            return f"expected {name} in every graph or in none"
        if values is None:
            continue
        shape = list(values.shape)
        wanted = "[edges]" if name == "edge_weight" else "[edges, channels]"
        is_wide = name == "edge_weight" and shape[1:] not in ([], [1])
        if not 1 <= len(shape) <= 2 or shape[0] != edge_index.shape[1] or is_wide:
            return f"expected {name} {wanted} of {edge_index.shape[1]} edges, got {shape}"
        if values.shape[1:] != first[name].shape[1:]:
            return (
                f"expected {name} as before, {list(first[name].shape[1:])} of an edge, got {shape}"
            )
        wrong = ~values.isfinite()
        if wrong.any():
            return f"{name} of its edge {int(wrong.nonzero()[0, 0])} is not a finite number"
    return ""
