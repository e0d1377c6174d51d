"""Edges between far nodes: random regular graphs, and nodes that are joined to all others."""

import torch
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.core.masks.edges import Edges


def expander_edges(lengths: Tensor, degree: int, seed: int = 0) -> Tensor:
    """A random regular graph on the nodes of each graph: as many edges enter and leave each node.

    Such graphs are expanders with high probability: any two nodes are joined by O(log n) steps, and
    attention along degree · n edges mixes as that of all n² pairs does (Shirzad et al., Exphormer,
    2023). Made of degree / 2 random cycles through all nodes, both ways around, as one of the
    paper's code's kinds is; so it is connected, and has no self-loops. A graph of two nodes has the
    edges between them repeated, a graph of one has none. The edges of a graph do not depend on the
    graphs beside it: graphs of as many nodes have the same.

    Args:
        lengths: integers [graphs], the nodes of each, which stand one after the other.
        degree: edges into each node, even.
        seed: of the cycles, which depend on it and on the number of nodes alone.

    Returns:
        integers [2, edges], source in row 0, target in row 1, on the device of `lengths`.

    Raises:
        ValueError: a degree that is odd or below 2.
    """
    if degree < 2 or degree % 2:
        raise ValueError(f"degree: expected an even number of at least 2, got {degree}")
    sizes = lengths.cpu()
    first = sizes.cumsum(0) - sizes
    parts = [torch.empty(2, 0, dtype=torch.int64)]
    for size in sizes[sizes > 1].unique().tolist():
        edges = _cycles(size, degree // 2, seed)
        parts.append((edges[:, None] + first[sizes == size, None]).flatten(1))
    return torch.cat(parts, dim=1).to(lengths.device)


def _cycles(size: int, number: int, seed: int) -> Tensor:
    """Edges [2, edges] of so many random cycles through the nodes of one graph, both ways."""
    generator = torch.Generator().manual_seed(seed)
    both: list[Tensor] = []
    for _ in range(number):
        order = torch.randperm(size, generator=generator)
        cycle = torch.stack([order, order.roll(-1)])
        both += [cycle, cycle.flip(0)]
    return torch.cat(both, dim=1)


def virtual_edges(lengths: Tensor, num_virtual: int) -> Tensor:
    """Edges [2, edges] from all nodes of a graph to its virtual nodes, then from these to them.

    The virtual nodes come behind all others: the first of each graph, the second of each, and so
    on.
    """
    at_least(1, num_virtual=num_virtual)
    graph = torch.repeat_interleave(lengths)
    nodes = torch.arange(len(graph), device=lengths.device)
    virtual = [len(graph) + number * len(lengths) + graph for number in range(num_virtual)]
    to_virtual = torch.stack([nodes.repeat(num_virtual), torch.cat(virtual)])
    return torch.cat([to_virtual, to_virtual.flip(0)], dim=1)


def joined_edges(
    edges: Edges,
    lengths: Tensor,
    *,
    degree: int | None = None,
    num_virtual: int = 0,
    seed: int = 0,
) -> tuple[Edges, Tensor]:
    """The edges of graphs, expander edges and those of virtual nodes, as one set to be sorted once.

    Args:
        edges: of the graphs themselves.
        lengths: nodes of each graph.
        degree: of `expander_edges`; None: there are none.
        num_virtual: of `virtual_edges`, of each graph; 0: none.
        seed: of the expander edges.

    Returns:
        the edges, between nodes and virtual nodes, and the type of each: 0 of the graph, 1
        expander, 2 to a virtual node, 3 from one.
    """
    device = edges.edge_index.device
    lengths = lengths.to(device)
    own = edges.edge_index.long()
    parts = [own, own[:, :0] if degree is None else expander_edges(lengths, degree, seed)]
    if num_virtual:
        parts += virtual_edges(lengths, num_virtual).chunk(2, dim=1)
    counts = torch.tensor([part.shape[1] for part in parts], device=device)
    types = torch.repeat_interleave(torch.arange(len(parts), device=device), counts)
    num_nodes = edges.sizes[0] + num_virtual * len(lengths)
    return Edges(torch.cat(parts, dim=1), num_nodes), types
