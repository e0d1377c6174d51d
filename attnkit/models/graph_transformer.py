"""A graph transformer: local attention along edges and global attention in each graph."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnkit.core.arguments import at_least
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.kept import kept
from attnkit.core.masks.sequences import Packed
from attnkit.layers.graph.attention import GraphScoreName
from attnkit.layers.graph.blocks import GlobalAttention, GraphTransformerBlock, SparseLinear
from attnkit.layers.graph.receptive_field import ReceptiveField, edges_of_layers
from attnkit.layers.transformer import Activation
from attnkit.models.graph_model import GraphModel, Hops, Pool, ReadOut


class GraphTransformer(GraphModel):
    """Graph transformer of pre-norm blocks (Rampášek et al., GraphGPS, 2022; with local attention
    alone, Dwivedi and Bresson 2021).

        x = linear(x) + linear(positions)
        x = block(x, edges)         num_layers times
        logits = linear(norm(x))    of nodes, of pooled graphs, or of pairs [x_i, x_j]

    With `expander_degree` or `num_virtual_nodes` it is Exphormer (Shirzad et al., 2023): local
    attention goes along the edges of the graph, a random regular graph on its nodes, and edges from
    and to virtual nodes, all in one softmax, at a cost linear in the nodes. The type of an edge (of
    the graph, expander, to a virtual node, from one) is a feature that every layer learns: it is
    added to keys and values, as `GraphAttention`'s edge features are; the paper's multiplies the
    keys. Virtual nodes begin as learned vectors and pass through the blocks as nodes do; they need
    `global_attention=None`.

    Args:
        in_channels: channels of the nodes.
        hidden_channels: channels between blocks.
        num_classes: number of logits.
        num_layers, heads: number of blocks, and of heads of each.
        local: the score along edges, as in `GraphAttention`; None: no local attention.
        global_attention: "softmax", "linear" for large graphs, or None.
        readout: what the logits describe: "node", "graph" or "edge" (pairs of nodes).
        pool: pooling for the readout "graph": "attention" with one learned query, or PyG's global
            "mean", "sum" or "max".
        position_dim: channels of positional encodings, such as those of PyG's transforms
            `AddRandomWalkPE` and `AddLaplacianEigenvectorPE`; None: no positions.
        random_signs: whether to flip the sign of each column of the positions at random in
            training. The sign of an eigenvector is arbitrary, so that this suits eigenvectors.
        edge_dim: channels of the edge features, which local attention reads.
        expander_degree: number of edges into each node of the random regular graph
            (`expander_edges`), even; None: no such graph.
        num_virtual_nodes: number of virtual nodes of each graph; needs `global_attention=None`.
        expander_seed: seed of the random graph, which depends only on it and the number of nodes.
        mlp_ratio, dropout_p, attention_dropout_p, activation, backend: settings of the blocks.

    Raises:
        ValueError: sizes that do not divide, unknown choices, or missing arguments.
    """

    num_hops: int | None
    """The distance in edges up to which nodes affect the logits of a node; None: all nodes do."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_classes: int,
        *,
        num_layers: int = 4,
        heads: int = 8,
        local: GraphScoreName | None = "scaled_dot",
        global_attention: GlobalAttention | None = "softmax",
        readout: ReadOut = "node",
        pool: Pool = "attention",
        position_dim: int | None = None,
        random_signs: bool = False,
        edge_dim: int | None = None,
        expander_degree: int | None = None,
        num_virtual_nodes: int = 0,
        expander_seed: int = 0,
        mlp_ratio: float = 2.0,
        dropout_p: float = 0.2,
        attention_dropout_p: float = 0.0,
        activation: Activation = "gelu",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        at_least(1, num_layers=num_layers)
        if random_signs and position_dim is None:
            raise ValueError("random_signs: needs positions, but position_dim is None")
        at_least(0, num_virtual_nodes=num_virtual_nodes, expander_seed=expander_seed)
        self.joins = expander_degree is not None or num_virtual_nodes > 0
        if self.joins and local is None:
            name = "num_virtual_nodes" if expander_degree is None else "expander_degree"
            raise ValueError(f"{name}: edges are for local attention, but local is None")
        if num_virtual_nodes and global_attention is not None:
            raise ValueError(
                "num_virtual_nodes: replace global_attention, which has to be None, "
                f"got {global_attention!r}"
            )
        if expander_degree is not None and (expander_degree < 2 or expander_degree % 2):
            raise ValueError(
                f"expander_degree: expected an even number of at least 2, got {expander_degree}"
            )
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.edge_dim = edge_dim
        self.position_dim = position_dim
        is_local = global_attention is None and readout == "node" and not self.joins
        self.num_hops = num_layers if is_local else None
        self.random_signs = random_signs
        self.embed = SparseLinear(in_channels, hidden_channels)
        self.expander_degree = expander_degree
        self.num_virtual_nodes = num_virtual_nodes
        self.expander_seed = expander_seed
        if num_virtual_nodes:
            self.virtual_nodes = nn.Parameter(torch.empty(num_virtual_nodes, hidden_channels))
            self.reset_parameters()
        num_types = 0 if not self.joins else 4 if num_virtual_nodes else 2
        features = (edge_dim or 0) + num_types
        self.position_embed = None
        if position_dim is not None:
            self.position_embed = nn.Linear(position_dim, hidden_channels)
        self.dropout = nn.Dropout(dropout_p)
        self.blocks = nn.ModuleList(
            GraphTransformerBlock(
                hidden_channels,
                heads,
                local=local,
                global_attention=global_attention,
                edge_dim=features or None,
                mlp_ratio=mlp_ratio,
                dropout_p=dropout_p,
                attention_dropout_p=attention_dropout_p,
                activation=activation,
                backend=backend,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_channels)
        width = self._reads(readout, pool, hidden_channels, heads, backend)
        self.head = nn.Linear(width, num_classes)

    def reset_parameters(self) -> None:
        """Initialize the virtual nodes standard normal."""
        if self.num_virtual_nodes:
            nn.init.normal_(self.virtual_nodes)

    def forward(
        self,
        x: Annotated[Tensor, "nodes channels"],
        edge_index: Annotated[Tensor, "2 edges", int] | Edges | ReceptiveField,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | None = None,
        *,
        batch: Annotated[Tensor, "nodes", int] | None = None,
        num_graphs: int | None = None,
        positions: Annotated[Tensor, "nodes position_dim"] | None = None,
        pairs: Annotated[Tensor, "2 pairs", int] | None = None,
    ) -> Annotated[Tensor, "rows classes"]:
        """Return logits of nodes, graphs or pairs, by the readout.

        Args:
            x: dense or sparse CSR.
            edge_index: as in `GraphAttention`. A receptive field is for local attention and the
                readout "node".
            batch: the index of each node's graph, sorted; None: all nodes are of one graph.
            num_graphs: number of graphs; needed if the last ones have no nodes.
            pairs: for the readout "edge", the two nodes of each pair: the first nodes in row 0, the
                second in row 1; so [2, 2] are two pairs.

        Raises:
            ValueError, TypeError, IndexError: an argument of another shape or type, or one that
                names nodes which do not exist.
        """
        expected = None if self.position_dim is None else [x.shape[0], self.position_dim]
        given = None if positions is None else list(positions.shape)
        if given != expected:
            wanted = "none" if expected is None else f"[nodes, position_dim] = {expected}"
            raise ValueError(f"positions: expected {wanted}, got {given}")
        lengths = self._sizes_of_graphs(x, edge_index, batch, num_graphs, pairs)
        if self.joins and isinstance(edge_index, ReceptiveField):
            raise ValueError(
                "edge_index: with expander edges or virtual nodes every output depends on all "
                "nodes, expected no receptive field"
            )
        hops = edges_of_layers(edge_index, edge_attr, x.shape[0], len(self.blocks), self.edge_dim)
        of_all = torch.tensor([x.shape[0]], device=x.device) if lengths is None else lengths
        x = self.embed(x)
        if positions is not None and self.position_embed is not None:
            if self.random_signs and self.training:
                signs = torch.randint(0, 2, positions.shape[1:], device=x.device) * 2 - 1
                positions = positions * signs
            x = x + self.position_embed(positions.to(x.dtype))
        x = self.dropout(x)
        num_nodes = x.shape[0]
        if self.joins:
            hops = [self._join(*hops[0], of_all.to(x.device), x.dtype)] * len(hops)
        if self.num_virtual_nodes:
            x = torch.cat([x, self.virtual_nodes.repeat_interleave(len(of_all), dim=0)])
        mask = Packed(of_all) if len(of_all) > 1 else None
        for block, (edges, features) in zip(self.blocks, hops, strict=True):
            x = block(x, edges, features, mask=mask)
        x = self.norm(x[:num_nodes] if self.num_virtual_nodes else x)
        return self.head(self._read(x, lengths, pairs))

    def _join(
        self, edges: Edges, edge_attr: Tensor | None, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Edges, Tensor]:
        """Return all edges as one set and their features; the set of a single graph is cached."""
        if self.expander_degree is not None and torch.compiler.is_exporting():
            raise ValueError(
                "expander_degree: expander edges depend on the number of nodes and cannot be "
                "exported; expected None"
            )
        degree, num_virtual, seed = self.expander_degree, self.num_virtual_nodes, self.expander_seed
        make = partial(
            joined_edges, edges, lengths, degree=degree, num_virtual=num_virtual, seed=seed
        )
        if len(lengths) > 1:
            joined, types = make()
        else:
            key, device = (degree, num_virtual, seed), edges.edge_index.device
            joined, types = kept(edges, "_joined", key, device, make, in_programs=True)
        features = F.one_hot(types, 4 if self.num_virtual_nodes else 2).to(dtype)
        if edge_attr is not None:  # features of the graph's own edges, which come first
            edge_attr = edge_attr[:, None] if edge_attr.ndim == 1 else edge_attr
            added = joined.num_edges - edges.num_edges
            features = torch.cat([features, F.pad(edge_attr, (0, 0, 0, added))], dim=1)
        return joined, features

    @property
    def hops(self) -> Hops | None:
        """The network layer by layer, for a graph that is computed in parts; None with global
        attention, positions or a readout other than "node", where this is impossible."""
        if self.num_hops is None or self.position_embed is not None:
            return None

        def before(x: Tensor) -> Tensor:
            return self.dropout(self.embed(x))

        return Hops(before, list(self.blocks), lambda x: self.head(self.norm(x)))


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
