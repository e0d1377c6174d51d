"""Edges between far nodes: random regular graphs, and nodes that are joined to all others."""

import torch
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.core.masks.edges import Edges


def expander_edges(lengths: Tensor, degree: int, seed: int = 0) -> Tensor:
    """Return a random regular graph on the nodes of each graph, with `degree` edges into each node.

    Such graphs are expanders with high probability: any two nodes are joined by O(log n) steps, and
    attention along degree · n edges mixes information as attention over all n² pairs does (Shirzad
    et al., Exphormer, 2023). The graph consists of degree / 2 random cycles through all nodes, in
    both directions, which is one of the kinds in the paper's code; so it is connected and has no
    self-loops. A graph of two nodes has repeated edges, a graph of one node has none. The edges of
    a graph do not depend on the graphs beside it: graphs of equal size have equal edges.

    Args:
        lengths: integers [graphs], the number of nodes of each; graphs are concatenated.
        degree: number of edges into each node, even.
        seed: seed of the cycles, which depend only on it and on the number of nodes.

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
    """Return edges [2, edges] of `number` random cycles through one graph, in both directions."""
    generator = torch.Generator().manual_seed(seed)
    both: list[Tensor] = []
    for _ in range(number):
        order = torch.randperm(size, generator=generator)
        cycle = torch.stack([order, order.roll(-1)])
        both += [cycle, cycle.flip(0)]
    return torch.cat(both, dim=1)


def virtual_edges(lengths: Tensor, num_virtual: int) -> Tensor:
    """Return edges [2, edges] from all nodes of a graph to its virtual nodes, then their reverse.

    Virtual nodes are numbered after all other nodes: first the first one of each graph, then the
    second one of each, and so on.
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
    """Join the graphs' edges, expander edges and edges of virtual nodes into one set.

    Args:
        edges: edges of the graphs themselves.
        lengths: number of nodes of each graph.
        degree: as in `expander_edges`; None: no expander edges.
        num_virtual: virtual nodes of each graph; 0: none.
        seed: seed of the expander edges.

    Returns:
        The edges between nodes and virtual nodes, sorted once, and the type of each edge: 0 edge of
        the graph, 1 expander edge, 2 edge to a virtual node, 3 edge from one.
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
