"""The edges of a heterogeneous graph as one set, with a type each."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import cached
from attnkit.core.masks.remembered import remembered_of

EdgeType = tuple[str, str, str]
"""Source node type, relation and target node type, as in PyG."""

NodesByType = Mapping[str, Annotated[Tensor, "_ _"]]
"""Nodes [nodes, channels] by node type."""

EdgesByType = Mapping[EdgeType, Annotated[Tensor, "2 _", int]]
"""Edges [2, edges] by edge type, or sparse matrices [targets, sources]."""

Metadata = tuple[list[str], list[EdgeType]]
"""Node types and edge types, as PyG's `HeteroData.metadata()` gives them; of a JSON file, which has
no tuples, lists will do."""

AttentionMechanism = Literal["across-relation", "within-relation"]
"""Whether the weights of all edges into a node sum to 1, or those of each type."""


def as_metadata(metadata: Metadata) -> Metadata:
    """The same with edge types that are tuples; ValueError names what is none."""
    if not isinstance(metadata, list | tuple) or len(metadata) != 2:
        raise ValueError(
            f"metadata: expected (node types, edge types), as data.metadata() is, got {metadata!r}"
        )
    node_types = [*metadata[0]]
    edge_types = [tuple(key) if isinstance(key, list) else key for key in metadata[1]]
    for key in edge_types:
        _check_edge_type("metadata", key, node_types)
    return node_types, edge_types


def _check_edge_type(argument: str, key: object, node_types: Iterable[str]) -> None:
    """ValueError unless it is a tuple of three that joins nodes of these types."""
    if not isinstance(key, tuple) or len(key) != 3:
        raise ValueError(f"{argument}: expected (source, relation, target), got {key!r}")
    for name in key[::2]:
        if name not in node_types:
            raise ValueError(
                f"{argument}: {key} joins nodes of type {name!r}, expected one of "
                f"{', '.join(map(repr, node_types))}"
            )


class Pairs(NamedTuple):
    """The pairs of a type and a node that some edge has, one type after the other.

    type, node: of each pair, [pairs]. counts: how many of each type. of_edge: the pair of each
    edge, [edges].
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
    nodes of all types, one type after the other; its sources are pairs of an edge type and a node,
    since keys and values depend on both. Only pairs that occur are counted. What is given is
    copied: what is written to it afterwards changes nothing.

    Layers that are given the dict, or the tensors, make this object at the first call and remember
    it as long as the first tensor lives. They make another where numbers were written to.

    Args:
        edge_index: by edge type, each as in `Edges`; or integers [2, edges] between nodes of one
            type.
        num_nodes: by node type; or a number.
        edge_type: of each edge, integers from 0 [edges]; None where `edge_index` says it.
        num_types: of the edges; likewise.

    Raises:
        TypeError, ValueError, IndexError: as `Edges`; types that do not fit.
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
                    "edge_type and num_types: leave out, the keys of edge_index are the types"
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
                raise type(error)(f"{error}, of {key}") from None
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
        """From pairs of an edge type and a source to nodes."""
        edges = torch.stack([self.sources.of_edge, self.edge_index[1]])
        return Edges(edges, self.num_nodes, len(self.sources.node))

    @cached
    def within(self) -> Edges:
        """From pairs of an edge type and a source to those of the same type and a target."""
        edges = torch.stack([self.sources.of_edge, self.targets.of_edge])
        return Edges(edges, len(self.targets.node), len(self.sources.node))

    def mask(self, mechanism: AttentionMechanism) -> Edges:
        """The edges of all types as one mask: `across` or `within`."""
        return self.across if mechanism == "across-relation" else self.within

    def summed(
        self, output: Annotated[Tensor, "heads _ channels"], mechanism: AttentionMechanism
    ) -> Annotated[Tensor, "heads nodes channels"]:
        """What nodes get of all edge types, [heads, nodes, channels], of what `mask` gave."""
        if mechanism == "across-relation":
            return output
        nodes = output.new_zeros(output.shape[0], self.num_nodes, output.shape[2])
        return nodes.index_add(1, self.targets.node, output)

    def of_sources(
        self, key: EdgeType, rows: Annotated[Tensor, "_ channels"]
    ) -> Annotated[Tensor, "_ channels"]:
        """The rows of a node type that belong to the sources of an edge type."""
        nodes = self._sources_by_type[tuple(key)]  # type: ignore[index]
        return rows if nodes is None else rows.index_select(0, nodes)

    @cached
    def _sources_by_type(self) -> dict[EdgeType, Tensor | None]:
        """The nodes of `sources` by edge type, counted from those of their type; None: all."""
        found = {}
        parts = self.sources.node.split(self.sources.counts)
        for key, part in zip(self.edge_types, parts, strict=True):
            nodes = self.nodes[key[0]]
            is_all = len(part) == nodes.stop - nodes.start
            found[key] = None if is_all else part - nodes.start
        return found

    def by_type(
        self, rows: Annotated[Tensor, "edges heads"]
    ) -> dict[EdgeType, Annotated[Tensor, "_ heads"]]:
        """Rows of the edges as those of each edge type; of edges that were given by type."""
        return dict(zip(self.edge_types, rows.split(self.counts), strict=True))


def remembered_typed_edges(
    edge_index: EdgesByType | Tensor,
    num_nodes: Mapping[str, int] | int,
    edge_type: Tensor | None = None,
    num_types: int | None = None,
) -> TypedEdges:
    """`TypedEdges` of these tensors, the object that an earlier call made or a new one.

    Tensors and sizes are compared with those of then, as `remembered_edges` does it.
    """

    def make() -> TypedEdges:
        return TypedEdges(edge_index, num_nodes, edge_type, num_types)

    if isinstance(edge_index, Mapping):
        nodes = tuple(num_nodes.items()) if isinstance(num_nodes, Mapping) else num_nodes
        return remembered_of([*edge_index.values()], (*edge_index, nodes), make)
    # kept with the types: GraphAttention keeps its `Edges` with the edges
    return remembered_of([edge_type, edge_index], (num_nodes, num_types), make)


def as_typed_edges(
    edge_index: EdgesByType | TypedEdges, x: NodesByType, metadata: Metadata
) -> tuple[TypedEdges, list[int]]:
    """The edges between these nodes, and the place in the metadata of each of their types."""
    node_types, edge_types = metadata
    num_nodes = {}
    for name, nodes in x.items():
        if name not in node_types:
            names = ", ".join(map(repr, node_types))
            raise ValueError(f"x_dict: the layer has the node types {names}, got {name!r}")
        if not isinstance(nodes, Tensor) or nodes.ndim != 2:
            given = list(nodes.shape) if isinstance(nodes, Tensor) else type(nodes).__name__
            raise ValueError(f"x_dict: expected [nodes, channels] of {name!r}, got {given}")
        num_nodes[name] = len(nodes)
    if not isinstance(edge_index, TypedEdges):
        edge_index = remembered_typed_edges(edge_index, num_nodes)
    elif {name: nodes.stop - nodes.start for name, nodes in edge_index.nodes.items()} != num_nodes:
        raise ValueError(
            f"edge_index_dict: TypedEdges is of other nodes than x_dict, which has {num_nodes}"
        )
    for key in edge_index.edge_types:
        if key not in edge_types:
            raise ValueError(f"edge_index_dict: {key} is none of the layer's edge types")
    return edge_index, [edge_types.index(key) for key in edge_index.edge_types]


def grouped(
    rows: Annotated[Tensor, "rows in_channels"],
    counts: list[int],
    weight: Annotated[Tensor, "_ in_channels out_channels"],
) -> Annotated[Tensor, "rows out_channels"]:
    """Rows of one type after the other, so many of each, times the matrix of their type."""
    parts = zip(rows.split(counts), weight, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def split_heads(rows: Tensor, heads: int) -> Tensor:
    """[rows, heads · channels] as [heads, rows, channels]."""
    return rows.unflatten(1, (heads, -1)).transpose(0, 1)
