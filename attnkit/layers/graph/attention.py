"""Attention of the nodes of a graph to their neighbours."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from attnkit.core.arguments import at_least, share
from attnkit.core.attend import attend
from attnkit.core.kernels.choose import named_backend
from attnkit.core.kernels.edges.edges import edge_weights
from attnkit.core.masks.edges import EdgeFeatures, Edges, in_callers_order
from attnkit.core.multihead import reset_linear
from attnkit.core.operators.cpu import dropout as drop
from attnkit.core.operators.sparse import products_of
from attnkit.core.scores.kinds import Score
from attnkit.core.scores.learned import ScoreName
from attnkit.core.weights import Indices, of_edges
from attnkit.layers.graph.heads import (
    GATHeads,
    GATv2Heads,
    GraphHeads,
    NodeHeads,
    QueryKeyValueHeads,
    first_nodes,
)
from attnkit.layers.graph.inputs import (
    EdgeModule,
    FillValue,
    Nodes,
    Size,
    check_fill_value,
    check_graph,
    looped_features,
    rows_of_edges,
    sources_and_targets,
)

GraphScoreName = Literal[ScoreName, "gat", "gatv2"]


class GraphAttention(EdgeModule):
    """Multi-head attention of nodes to their neighbours.

        head_h,i = Σ_e weight_h,e · (W_v,h x_j + W_e,h e_ij)    over the edges e from j to i
        weight_h,e = softmax_e(score(W_q,h x_i, W_k,h x_j + W_e,h e_ij))
        output_i = [head_1,i … head_H,i] + W_r x_i + b

    This is a Transformer's attention whose mask is the graph's edges. The score selects the layer:
    "scaled_dot" is UniMP (Shi et al., Masked Label Prediction, 2021; PyG's `TransformerConv`).
    "gatv2" is GATv2 (Brody et al., How Attentive are Graph Attention Networks?, 2022), whose values
    are its keys. "gat" is GAT (Veličković et al., Graph Attention Networks, 2018), whose queries,
    keys and values share one projection. In GATv2 and GAT, edge features change the weights and not
    the values. `attnkit.interop.from_pyg` converts PyG's layers.

    A node without edges gives W_r x_i + b. Cost and memory are proportional to edges × heads,
    except with edge features and "cosine" or "gaussian", which only the reference kernel computes.

    Args:
        in_channels: channels of the nodes, or a pair (sources, targets); −1: taken from the first
            input; until then the layer's parameters cannot be saved or loaded.
        out_channels: channels of a head.
        heads: number of heads.
        score: "scaled_dot", "dot", "general", "cosine", "gaussian" or "additive" (Bahdanau's), each
            with projections to queries, keys and values; "gatv2"; "gat"; or a `Score` or module as
            in `MultiHeadAttention`.
        concat: True concatenates the heads, heads · out_channels; False takes their mean,
            out_channels.
        edge_dim: channels of the edge features; None: edges have no features.
        add_self_loops: replace the graph's self-loops by one for every node, with the features that
            `fill_value` gives.
        fill_value: features of self-loops: a number, a tensor [edge_dim], or the "mean", "add",
            "min", "max" or "mul" of the features of the node's other edges.
        residual: whether to add W_r x_i, the root weight.
        gate: mix the root in, β W_r x_i + (1 − β) head_i with a learned β in (0, 1), instead of
            adding it (UniMP; PyG's `beta`).
        separate_self: concatenate the node's own value and what it gathered, [W_v x_i, head_i],
            which doubles the channels (GAT-sep; Platonov et al., A Critical Look at the Evaluation
            of GNNs under Heterophily, 2023). The layer that follows mixes them.
        dropout_p, backend: as in `MultiHeadAttention`.
        value_dropout_p: dropout of the values W_v x_j, drawn once for all edges of a source, in
            training only; it does not change the scores (as in the code of GAT's authors).
        dropout: PyG's name for `dropout_p`; give only one of the two.
        negative_slope: slope of the LeakyReLU of "gat" and "gatv2".
        share_weights: with "gatv2", use one projection for queries and keys.
        bias: whether the projections add a bias; None: yes, except for "gat".
        out_bias: whether the output adds a bias.

    Raises:
        ValueError, TypeError: options that are wrong or that the score does not use.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        *,
        score: GraphScoreName | Score | nn.Module = "scaled_dot",
        concat: bool = True,
        edge_dim: int | None = None,
        add_self_loops: bool = False,
        fill_value: FillValue = "mean",
        residual: bool = False,
        gate: bool = False,
        separate_self: bool = False,
        dropout_p: float = 0.0,
        value_dropout_p: float = 0.0,
        dropout: float | None = None,
        negative_slope: float = 0.2,
        share_weights: bool = False,
        bias: bool | None = None,
        out_bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        is_pair = not isinstance(in_channels, int)
        sizes = in_channels if isinstance(in_channels, tuple | list) else (in_channels,) * 2
        if len(sizes) != 2:
            raise ValueError(f"in_channels: expected one number or two, got {in_channels}")
        self.in_channels = sizes[0], sizes[1]
        self.is_bipartite = is_pair
        # placeholders for sizes that the first input decides, unequal if they are a pair
        sizes = sizes[0] if sizes[0] != -1 else 1, sizes[1] if sizes[1] != -1 else 1 + is_pair
        at_least(
            1, in_channels=min(sizes), out_channels=out_channels, heads=heads, edge_dim=edge_dim
        )
        if dropout is not None:
            if dropout_p:
                raise ValueError(
                    "dropout: another name of dropout_p, expected only one of them, "
                    f"got {dropout} and {dropout_p}"
                )
            dropout_p = dropout
        share(dropout_p=dropout_p, value_dropout_p=value_dropout_p)
        if gate and not residual:
            raise ValueError("gate: needs residual=True, whose W_r x_i it mixes in")
        if separate_self and is_pair:
            raise ValueError(f"separate_self: expected sources that are the targets, got {sizes}")
        if share_weights and (score != "gatv2" or len(set(self.in_channels)) > 1):
            raise ValueError(
                f"share_weights: expected the score 'gatv2' and one in_channels, "
                f"got {score} and {in_channels}"
            )
        if negative_slope != 0.2 and score not in ("gat", "gatv2"):
            raise ValueError(f"negative_slope: only for 'gat' and 'gatv2', got the score {score}")
        check_fill_value(fill_value, is_read=add_self_loops and edge_dim is not None)
        named_backend(backend)
        self.out_channels = out_channels
        self.heads = heads
        self.concat = concat
        self.edge_dim = edge_dim
        self.add_self_loops = add_self_loops
        self.separate_self = separate_self
        self.dropout_p = dropout_p
        self.value_dropout_p = value_dropout_p
        self.backend = backend
        self.fill_value: FillValue
        if isinstance(fill_value, Tensor):
            # a plain attribute, which `to_empty` does not clear
            self._given_fill_value = fill_value.detach().clone()
            self.register_buffer("fill_value", self._given_fill_value.clone(), persistent=False)
        else:
            self.fill_value = fill_value
        self.projections: GraphHeads
        if score == "gat":
            self.projections = GATHeads(
                sizes, out_channels, heads, edge_dim,
                is_bipartite=is_pair, negative_slope=negative_slope, bias=bool(bias),
            )  # fmt: skip
        elif score == "gatv2":
            self.projections = GATv2Heads(
                sizes, out_channels, heads, edge_dim,
                negative_slope=negative_slope, share_weights=share_weights, bias=bias is not False,
            )  # fmt: skip
        else:
            self.projections = QueryKeyValueHeads(
                sizes, out_channels, heads, edge_dim, score=score, bias=bias is not False
            )
        width = self.width
        self.residual_proj = nn.Linear(sizes[1], width, bias=out_bias) if residual else None
        self.gate_proj = nn.Linear(3 * width, 1, bias=False) if gate else None
        self.out_bias = nn.Parameter(torch.zeros(width)) if out_bias and not residual else None
        for linear, channels in self._readers(*self.in_channels):
            if channels == -1:
                linear.weight = nn.UninitializedParameter()
        self.reset_parameters()

    @property
    def width(self) -> int:
        """Number of channels of the output."""
        width = self.heads * self.out_channels if self.concat else self.out_channels
        return 2 * width if self.separate_self else width

    def reset_parameters(self) -> None:
        """Set matrices Xavier-uniform and biases to 0; a layer whose `in_channels` is −1 does this
        at its first input."""
        if isinstance(self.fill_value, Tensor):
            self.fill_value.copy_(self._given_fill_value)
        if -1 in self.in_channels:
            return
        self.projections.reset_parameters()
        for module in (self.residual_proj, self.gate_proj):
            if module is not None:
                reset_linear(module)
        if self.out_bias is not None:
            nn.init.zeros_(self.out_bias)

    def forward(
        self,
        x: Nodes,
        edge_index: Annotated[Tensor, "2 edges", int] | Edges,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | Annotated[Tensor, "edges"] | None = None,
        size: Size | None = None,
        return_attention_weights: bool | None = None,
        *,
        edge_bias: Annotated[Tensor, "edges #heads"] | Annotated[Tensor, "edges"] | None = None,
    ) -> Annotated[Tensor, "*batch targets out_channels"]:
        """Compute what each node gathers from its neighbours.

        Args:
            x: node features, dense or sparse CSR, or a pair of those of sources and of targets.
                Dense features may have a batch dimension first; all its items share the graph.
                Targets may be None with "gat", without `gate` and `separate_self`: they then add
                nothing to the scores and have no residual. If x is one tensor and `Edges` has fewer
                targets than sources, the targets are its first rows.
            edge_index: sources in row 0 and targets in row 1 (as in PyG, also its `EdgeIndex`), a
                sparse matrix [targets, sources], or `attnkit.Edges`. The edges of a tensor are
                sorted at its first call, for all layers and epochs, as long as the tensor lives,
                and again after it was written to. On a GPU only writes by torch operators are
                noticed, and sparse matrices there are read at every call.
            edge_attr: features of the edges; a single channel may omit its dimension.
            size: number of sources and of targets, needed if x does not determine it, else checked.
            return_attention_weights: return the weights too, as PyG's layers do.
            edge_bias: bias added to the scores, one for all heads or one for each head: for example
                a learned bias for each distance (Ying et al., Graphormer, 2021), or the logarithms
                of edge weights that multiply the exponentials. Added self-loops have the bias 0.

        Returns:
            The nodes, with heads · out_channels, or out_channels without `concat`; twice as many
            with `separate_self`. With `return_attention_weights`, a pair of the nodes and
            (edges [2, edges], weights [edges, heads] before dropout), added self-loops last. If
            the edges are a sparse matrix, the returned edges are one too, with the weights as
            values. The weights of a batch are [batch, edges, heads], in the matrix
            [edges, heads, batch].

        Raises:
            ValueError, TypeError, IndexError: features or edges of another shape or type.
        """
        source, target, edges, features, bias = self._read(
            x, edge_index, edge_attr, size, edge_bias
        )
        nodes = self._heads(x, source, target)
        output = self._output(nodes, x, target, edges, features, bias)
        if not return_attention_weights:
            return output
        used, carried = self._graph(edges, features, bias)
        weights = self._weights(nodes, used, carried)
        where = used.edge_index
        if not isinstance(edge_index, Edges) and edge_index.layout is not torch.strided:
            shape = (*used.sizes, *weights.shape[1:])
            where = torch.sparse_coo_tensor(where.flip(0), weights, shape)
        return output, (where, _batch_first(weights))  # type: ignore[return-value]

    def _output(
        self,
        nodes: NodeHeads,
        x: Nodes,
        target: Tensor,
        edges: Edges,
        features: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        output = self._merged(self._attend(nodes, edges, features, bias))
        if self.separate_self:
            if isinstance(x, Tensor):  # the targets are the first of the sources
                own = first_nodes(nodes.value, target.shape[-2])
            else:
                own = self.projections.own(target)
            output = torch.cat([self._merged(own), output], dim=-1)
        if self.residual_proj is not None:
            if target.shape[-1] == 0:  # targets without features count as zeros
                return output + self.residual_proj(output.new_zeros(1, self.in_channels[1]))
            with products_of(target):
                root = self.residual_proj(target)
            if self.gate_proj is None:
                return output + root
            beta = self.gate_proj(torch.cat([output, root, output - root], dim=-1)).sigmoid()
            return torch.lerp(output, root, beta)
        return output if self.out_bias is None else output + self.out_bias

    def check(
        self,
        x: Nodes,
        edge_index: Annotated[Tensor, "2 edges", int] | Edges,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | Annotated[Tensor, "edges"] | None = None,
    ) -> None:
        """Raise the error that `forward` would raise for these arguments."""
        if not isinstance(x, fx.Proxy):
            self._read(x, edge_index, edge_attr)

    def _read(
        self,
        x: Nodes,
        edge_index: Tensor | Edges,
        edge_attr: Tensor | None,
        size: Size | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Edges, Tensor | None, Tensor | None]:
        """Check the inputs; return sources, targets, edges, edge features and edge biases."""
        source, target = sources_and_targets(x, edge_index, size)
        if -1 in self.in_channels:
            self._infer(source.shape[-1], target.shape[-1])
        needs_targets = (
            self.separate_self
            or self.gate_proj is not None
            or not isinstance(self.projections, GATHeads)
        )
        edges, features = check_graph(
            source, target, edge_index, edge_attr, self.in_channels, self.edge_dim, needs_targets
        )
        if bias is not None:
            bias = rows_of_edges("edge_bias", bias, edges, "heads", (self.heads, 1))
        return source, target, edges, features, bias

    def _infer(self, sources: int, targets: int) -> None:
        """Set the channels that were −1 to those of the first input."""
        if not self.is_bipartite:
            targets = sources
        elif self.in_channels[1] == -1 and targets == 0:
            raise ValueError(
                "x: in_channels=-1 takes the targets' channels from the first x, got None"
            )
        given = zip(self.in_channels, (sources, targets), strict=True)
        sizes = [channels if own == -1 else own for own, channels in given]
        for linear, size in self._readers(*sizes):
            if is_lazy(linear.weight):
                linear.weight.materialize((linear.out_features, size))
                linear.in_features = size
        self.in_channels = sizes[0], sizes[1]
        self.reset_parameters()

    def _readers(self, sources: int, targets: int) -> list[tuple[nn.Linear, int]]:
        """Return the layers that read node features, each with its number of input channels."""
        root = [] if self.residual_proj is None else [(self.residual_proj, targets)]
        return [*self.projections.readers(sources, targets), *root]

    def attention_weights(
        self,
        x: Nodes,
        edge_index: Annotated[Tensor, "2 edges", int] | Edges,
        edge_attr: Annotated[Tensor, "edges edge_dim"] | Annotated[Tensor, "edges"] | None = None,
        *,
        rows: Indices = None,
        heads: Indices = None,
        edge_bias: Annotated[Tensor, "edges #heads"] | Annotated[Tensor, "edges"] | None = None,
    ) -> Annotated[Tensor, "*batch rows chosen_heads"]:
        """Return the weights that `forward` uses on the same arguments, before dropout.

        Args:
            rows: which edges, None for all.
            heads: which heads, None for all.

        Returns:
            Row e belongs to edge e of `edge_index`. With `add_self_loops` the loops of nodes
            0, 1, … follow, and the rows of self-loops in `edge_index`, which they replace, are 0.
            The rows of the edges into one node sum to 1.
        """
        source, target, edges, features, bias = self._read(
            x, edge_index, edge_attr, None, edge_bias
        )
        used, carried = self._graph(edges, features, bias)
        weights = self._weights(self._heads(x, source, target), used, carried)
        if self.add_self_loops:
            weights = in_callers_order(weights, used)
        return _batch_first(of_edges(weights, rows, heads))

    def _heads(self, x: Nodes, source: Tensor, target: Tensor) -> NodeHeads:
        with products_of(source, target):
            return self.projections(source, target, is_one=isinstance(x, Tensor))

    def _weights(self, nodes: NodeHeads, edges: Edges, carried: EdgeFeatures | None) -> Tensor:
        """Return the weights [edges, heads], or [edges, heads, batch]."""
        score = self.projections.current_score()
        weights = edge_weights(nodes.query, nodes.key, edges, score=score, edge_features=carried)
        return weights.movedim((-1, -2), (0, 1))

    def _attend(
        self, nodes: NodeHeads, edges: Edges, features: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return the heads' outputs [heads, targets, out_channels]."""
        used, carried = self._graph(edges, features, bias)
        value = nodes.value
        if self.training and self.value_dropout_p > 0:
            value = drop(value, self.value_dropout_p)
        return attend(
            nodes.query,
            nodes.key,
            value,
            score=self.projections.current_score(),
            mask=used,
            edge_features=carried,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )

    def _graph(
        self, edges: Edges, features: Tensor | None, bias: Tensor | None
    ) -> tuple[Edges, EdgeFeatures | None]:
        """Return the edges with self-loops, if any, and what they add to scores, keys, values."""
        used = edges.with_loops if self.add_self_loops else edges
        if self.add_self_loops and features is not None:
            features = looped_features(features, used, self.fill_value)
        if self.add_self_loops and bias is not None:
            bias = torch.cat([bias[used.proper], bias.new_zeros(min(used.sizes), bias.shape[1])])
        carried = None if features is None else self.projections.edge_features(features)
        if bias is not None:
            carried = replace(carried or EdgeFeatures(), bias=bias.T)
        return used, carried

    def _merged(self, output: Tensor) -> Tensor:
        """Concatenate the heads [heads, nodes, out_channels], or take their mean."""
        return output.transpose(-3, -2).flatten(-2) if self.concat else output.mean(dim=-3)

    def __repr__(self) -> str:
        channels = self.in_channels[0] if len(set(self.in_channels)) == 1 else self.in_channels
        return f"{type(self).__name__}({channels}, {self.out_channels}, heads={self.heads})"


def _batch_first(weights: Tensor) -> Tensor:
    """Return weights [edges, heads, batch] as [batch, edges, heads]; keep [edges, heads]."""
    return weights.movedim(2, 0) if weights.ndim == 3 else weights
