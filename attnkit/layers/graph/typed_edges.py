"""The edges of a heterogeneous graph as one set of edges with types."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import cached, remembered_of

EdgeType = tuple[str, str, str]
"""Source node type, relation and target node type, as in PyG."""

NodesByType = Mapping[str, Annotated[Tensor, "_ _"]]
"""Nodes [nodes, channels] by node type."""

EdgesByType = Mapping[EdgeType, Annotated[Tensor, "2 _", int]]
"""Edges [2, edges] by edge type, or sparse matrices [targets, sources]."""

Metadata = tuple[list[str], list[EdgeType]]
"""Node types and edge types, as PyG's `HeteroData.metadata()` gives them; lists are accepted for
tuples, which JSON files do not have."""

AttentionMechanism = Literal["across-relation", "within-relation"]
"""Whether the weights into a node sum to 1 over the edges of all types, or of each type."""


def as_metadata(metadata: Metadata) -> Metadata:
    """Return the metadata with edge types as tuples; raise a ValueError for invalid ones."""
    if not isinstance(metadata, list | tuple) or len(metadata) != 2:
        raise ValueError(
            "metadata: expected (node types, edge types), as data.metadata() returns, "
            f"got {metadata!r}"
        )
    node_types = [*metadata[0]]
    edge_types = [tuple(key) if isinstance(key, list) else key for key in metadata[1]]
    for key in edge_types:
        _check_edge_type("metadata", key, node_types)
    return node_types, edge_types


def _check_edge_type(argument: str, key: object, node_types: Iterable[str]) -> None:
    """Raise a ValueError unless `key` is a tuple of three that joins nodes of these types."""
    if not isinstance(key, tuple) or len(key) != 3:
        raise ValueError(f"{argument}: expected (source, relation, target), got {key!r}")
    for name in key[::2]:
        if name not in node_types:
            raise ValueError(
                f"{argument}: {key} joins nodes of type {name!r}, expected one of "
                f"{', '.join(map(repr, node_types))}"
            )


class Pairs(NamedTuple):
    """The pairs of an edge type and a node that occur in some edge, ordered by type.

    type, node: type and node of each pair, [pairs]. counts: number of pairs of each type. of_edge:
    index of the pair of each edge, [edges].
    """

    type: Tensor
    node: Tensor
    counts: list[int]
    of_edge: Tensor


class TypedEdges:
    """Edges of several types, sorted once for all layers and epochs that use them.

        edges = TypedEdges(data.edge_index_dict, data.num_nodes_dict)
        edges = TypedEdges(edge_index, num_nodes, edge_type, num_types)

    One softmax over edges of several types is attention over one set of edges. Its targets are the
    nodes of all types, ordered by type; its sources are pairs of an edge type and a node, since
    keys and values depend on both. Only pairs that occur are counted. The given tensors are copied,
    so writing to them afterwards changes nothing.

    Layers that are called with the dict or the tensors make this object at the first call and
    remember it as long as the first tensor lives. They make a new one after a tensor was written
    to.

    Args:
        edge_index: edges by edge type, each as in `Edges`; or integers [2, edges] between nodes of
            one type.
        num_nodes: number of nodes by node type; or one number.
        edge_type: type of each edge, integers from 0 [edges]; None if `edge_index` is a dict.
        num_types: number of edge types; None if `edge_index` is a dict.

    Raises:
        TypeError, ValueError, IndexError: edges that `Edges` refuses; types that do not fit.
    """

    def __init__(
        self,
        edge_index: EdgesByType | Annotated[Tensor, "2 edges", int],
        num_nodes: Mapping[str, int] | int,
        edge_type: Annotated[Tensor, "edges", int] | None = None,
        num_types: int | None = None,
    ) -> None:
        self.nodes: dict[str, slice]
        self.edge_types: list[Any]
        if isinstance(edge_index, Mapping) and isinstance(num_nodes, Mapping):
            if edge_type is not None or num_types is not None:
                raise ValueError(
                    "edge_type and num_types: expected None, since the keys of edge_index are the "
                    "types; leave both out"
                )
            self._read_types(edge_index, num_nodes)
        elif isinstance(edge_index, Tensor) and isinstance(num_nodes, int):
            self._read_numbers(edge_index, num_nodes, edge_type, num_types)
        else:
            raise TypeError(
                "edge_index and num_nodes: expected two dicts, or a tensor and a number, got "
                f"{type(edge_index).__name__} and {type(num_nodes).__name__}"
            )

    def _read_types(self, edge_index: EdgesByType, num_nodes: Mapping[str, int]) -> None:
        self.nodes, self.num_nodes = {}, 0
        for name, number in num_nodes.items():
            self.nodes[name] = slice(self.num_nodes, self.num_nodes + number)
            self.num_nodes += number
        parts = []
        for key, given in edge_index.items():
            _check_edge_type("edge_index", key, num_nodes)
            try:
                edges = Edges(given, (num_nodes[key[0]], num_nodes[key[2]])).edge_index
            except (TypeError, ValueError, IndexError) as error:
                raise type(error)(f"{error}, for the edge type {key}") from None
            first = [self.nodes[name].start for name in (key[0], key[2])]
            parts.append(edges.long() + torch.tensor(first, device=edges.device)[:, None])
        if not parts:
            raise ValueError("edge_index: expected at least one edge type, got none")
        counts = [part.shape[1] for part in parts]
        self.edge_types = [*edge_index]
        self.edge_index = torch.cat(parts, dim=1)
        types = torch.arange(len(parts), device=self.edge_index.device)
        self.edge_type = types.repeat_interleave(torch.tensor(counts, device=types.device))
        self.counts = counts

    def _read_numbers(
        self, edge_index: Tensor, num_nodes: int, edge_type: Tensor | None, num_types: int | None
    ) -> None:
        self.nodes, self.num_nodes = {}, num_nodes
        self.edge_index = Edges(edge_index, num_nodes).edge_index.to(torch.int64, copy=True)
        if edge_type is None or num_types is None:
            raise ValueError("edge_type and num_types: expected a type for each edge, got None")
        self.edge_types = [*range(num_types)]
        number = self.edge_index.shape[1]
        if edge_type.shape != (number,) or edge_type.is_floating_point():
            raise ValueError(
                f"edge_type: expected integers [{number} edges], got "
                f"{edge_type.dtype} {list(edge_type.shape)}"
            )
        if number and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < num_types:
            raise IndexError(
                f"edge_type: goes from {int(edge_type.min())} to {int(edge_type.max())}, "
                f"expected 0 to {num_types - 1}"
            )
        self.edge_type = edge_type.to(torch.int64, copy=True)
        self.counts = torch.bincount(self.edge_type, minlength=num_types).tolist()

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    @cached
    def sources(self) -> Pairs:
        """The pairs of an edge type and a source."""
        return self._pairs(self.edge_index[0])

    @cached
    def targets(self) -> Pairs:
        """The pairs of an edge type and a target."""
        return self._pairs(self.edge_index[1])

    def _pairs(self, nodes: Tensor) -> Pairs:
        numbers, of_edge = (self.edge_type * self.num_nodes + nodes).unique(return_inverse=True)
        types = numbers.div(max(self.num_nodes, 1), rounding_mode="floor")
        counts = torch.bincount(types, minlength=len(self.edge_types)).tolist()
        return Pairs(types, numbers - types * self.num_nodes, counts, of_edge)

    @cached
    def across(self) -> Edges:
        """The edges from pairs of an edge type and a source to nodes."""
        edges = torch.stack([self.sources.of_edge, self.edge_index[1]])
        return Edges(edges, self.num_nodes, len(self.sources.node))

    @cached
    def within(self) -> Edges:
        """The edges from pairs of an edge type and a source to pairs of that type and a target."""
        edges = torch.stack([self.sources.of_edge, self.targets.of_edge])
        return Edges(edges, len(self.targets.node), len(self.sources.node))

    def mask(self, mechanism: AttentionMechanism) -> Edges:
        """Return the edges of all types as one mask: `across` or `within`."""
        return self.across if mechanism == "across-relation" else self.within

    def summed(
        self, output: Annotated[Tensor, "heads _ channels"], mechanism: AttentionMechanism
    ) -> Annotated[Tensor, "heads nodes channels"]:
        """Sum attention outputs over edge types; `output` is that of attention with `mask`."""
        if mechanism == "across-relation":
            return output
        nodes = output.new_zeros(output.shape[0], self.num_nodes, output.shape[2])
        return nodes.index_add(1, self.targets.node, output)

    def of_sources(
        self, key: EdgeType, rows: Annotated[Tensor, "_ channels"]
    ) -> Annotated[Tensor, "_ channels"]:
        """Select the rows of a node type that belong to the sources of an edge type."""
        nodes = self._sources_by_type[tuple(key)]  # type: ignore[index]
        return rows if nodes is None else rows.index_select(0, nodes)

    @cached
    def _sources_by_type(self) -> dict[EdgeType, Tensor | None]:
        """The nodes of `sources` by edge type, numbered within their node type; None: all nodes."""
        sources: dict[EdgeType, Tensor | None] = {}
        parts = self.sources.node.split(self.sources.counts)
        for key, part in zip(self.edge_types, parts, strict=True):
            nodes = self.nodes[key[0]]
            is_all = len(part) == nodes.stop - nodes.start
            sources[key] = None if is_all else part - nodes.start
        return sources

    def by_type(
        self, rows: Annotated[Tensor, "edges heads"]
    ) -> dict[EdgeType, Annotated[Tensor, "_ heads"]]:
        """Split the rows of edges by edge type; only for edges that were given by type."""
        return dict(zip(self.edge_types, rows.split(self.counts), strict=True))


def remembered_typed_edges(
    edge_index: EdgesByType | Tensor,
    num_nodes: Mapping[str, int] | int,
    edge_type: Tensor | None = None,
    num_types: int | None = None,
) -> TypedEdges:
    """Return the `TypedEdges` that an earlier call made of these tensors, or new ones.

    Tensors and sizes are compared with those of the earlier call, as in `remembered_edges`.
    """

    def make() -> TypedEdges:
        return TypedEdges(edge_index, num_nodes, edge_type, num_types)

    if isinstance(edge_index, Mapping):
        nodes = tuple(num_nodes.items()) if isinstance(num_nodes, Mapping) else num_nodes
        return remembered_of([*edge_index.values()], (*edge_index, nodes), make)
    # keyed on edge_type first: GraphAttention remembers its `Edges` with edge_index
    return remembered_of([edge_type, edge_index], (num_nodes, num_types), make)


def as_typed_edges(
    edge_index: EdgesByType | TypedEdges, x: NodesByType, metadata: Metadata
) -> tuple[TypedEdges, list[int]]:
    """Return the edges between these nodes, and the index of each edge type in the metadata."""
    node_types, edge_types = metadata
    num_nodes = {}
    for name, nodes in x.items():
        if name not in node_types:
            names = ", ".join(map(repr, node_types))
            raise ValueError(f"x_dict: expected node types of the layer, {names}, got {name!r}")
        if not isinstance(nodes, Tensor) or nodes.ndim != 2:
            given = list(nodes.shape) if isinstance(nodes, Tensor) else type(nodes).__name__
            raise ValueError(f"x_dict: expected [nodes, channels] of {name!r}, got {given}")
        num_nodes[name] = len(nodes)
    if not isinstance(edge_index, TypedEdges):
        edge_index = remembered_typed_edges(edge_index, num_nodes)
    elif {name: nodes.stop - nodes.start for name, nodes in edge_index.nodes.items()} != num_nodes:
        raise ValueError(
            f"edge_index_dict: expected TypedEdges between the nodes of x_dict, {num_nodes}, "
            "got other numbers of nodes"
        )
    for key in edge_index.edge_types:
        if key not in edge_types:
            raise ValueError(f"edge_index_dict: expected edge types of the layer, got {key}")
    return edge_index, [edge_types.index(key) for key in edge_index.edge_types]


def grouped(
    rows: Annotated[Tensor, "rows in_channels"],
    counts: list[int],
    weight: Annotated[Tensor, "_ in_channels out_channels"],
) -> Annotated[Tensor, "rows out_channels"]:
    """Multiply rows, which are ordered by type with `counts` of each, with their type's matrix."""
    parts = zip(rows.split(counts), weight, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def split_heads(rows: Tensor, heads: int) -> Tensor:
    """Return [rows, heads · channels] as [heads, rows, channels]."""
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)
