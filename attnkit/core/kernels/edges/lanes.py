"""What attention over edges computes at once: lanes, one for each batch item and head, in groups.

Lanes of a small graph are computed together, as one graph of copies side by side; those of a large
one in turn, in memory that each hands to the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.core.inputs import Inputs
from attnkit.core.kernels.edges.scores import AdditiveEdges, DotEdges, ScalarEdges, sum_weights
from attnkit.core.masks.adjacency import Adjacency
from attnkit.core.masks.edges import Edges
from attnkit.core.operators.dropout import keep_mask
from attnkit.core.scores.additive import Additive

GROUP = 2**17  # edges × heads up to which the heads of a small graph are computed as one graph
SPREAD = 60.0  # scores that differ by no more have exponentials within float32's range


@dataclass(frozen=True, eq=False)
class Plan:
    """What is computed, beside the tensors that have gradients."""

    adjacency: Adjacency
    scale: float
    negative_slope: float | None
    sums_features: bool
    dropout_p: float
    seed: Tensor | None
    """One integer; None: no dropout."""

    def groups(self, num_lanes: int) -> Iterator[tuple[slice, Adjacency]]:
        """Lanes that are computed at once, and their graphs side by side."""
        num_edges = self.adjacency.num_edges
        if num_edges == 0:  # nothing to compute, all is 0
            return
        size = max(1, min(num_lanes, GROUP // num_edges))
        for first in range(0, num_lanes, size):
            lanes = slice(first, min(first + size, num_lanes))
            yield lanes, self.adjacency.copies(lanes.stop - first)

    def keep(self, lanes: slice, like: Tensor) -> Tensor | None:
        """What dropout multiplies the weights of these lanes by, the same at each call."""
        if self.seed is None:
            return None
        generator = torch.Generator(like.device).manual_seed(int(self.seed) + lanes.start)
        return keep_mask(like, self.dropout_p, generator)


Tensors = Sequence[Tensor | None]
"""Those of `NAMES`, of all lanes."""


def as_lanes(inputs: Inputs) -> tuple[Plan, tuple[Tensor | None, ...]]:
    """The plan, and the tensors of one lane for each batch item and head: query, key, value,
    vector, edge_query, edge_key, features, bias."""
    assert isinstance(inputs.mask, Edges)
    batch, num_heads = inputs.query.shape[:2]
    adjacency, features = inputs.mask.adjacency, inputs.edge_features
    key, value = inputs.repeated_heads()
    score = inputs.score
    vector = edge_query = edge_key = rows = key_weight = slope = bias = None
    scale = 1.0
    if features is not None:
        key_weight = features.key_weight
        rows, bias = features.features, features.bias
        if adjacency.order is not None:
            rows = None if rows is None else rows.index_select(0, adjacency.order)
            bias = None if bias is None else bias.index_select(1, adjacency.order)
        if bias is not None:
            bias = bias.expand(batch, num_heads, -1).flatten(0, 1)
    if isinstance(score, Additive):
        slope = score.negative_slope
        query = inputs.query
        vector = score.vector.expand(batch, num_heads, -1).flatten(0, 1)
        if key_weight is not None:
            edge_key = key_weight.expand(batch, -1, -1, -1).flatten(0, 1)
    else:
        lowered = replace(inputs, key=key, value=value).as_scaled_dot()
        query, key, scale = lowered.query, lowered.key, lowered.scale
        if key_weight is not None:
            edge_query = (query @ key_weight).flatten(0, 1)
    plan = Plan(
        adjacency,
        scale=scale,
        negative_slope=slope,
        sums_features=features is not None and features.value_weight is not None,
        dropout_p=inputs.dropout_p,
        seed=torch.randint(2**62, ()) if inputs.dropout_p else None,
    )
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    return plan, (query, key, value, vector, edge_query, edge_key, rows, bias)


NAMES = ("query", "key", "value", "vector", "edge_query", "edge_key", "features", "bias")


def make_scorer(
    plan: Plan,
    graph: Adjacency,
    workspace: "Workspace",
    lanes: slice,
    tensors: Tensors,
) -> AdditiveEdges | DotEdges:
    query, key, _, vector, edge_query, edge_key, features, _ = tensors
    assert query is not None
    assert key is not None
    rows = None if features is None else features_of(features, lanes)
    if vector is None:
        tables = workspace.table("query", query, lanes), workspace.table("key", key, lanes)
        edge_table = None if edge_query is None else workspace.table("edges", edge_query, lanes)
        return DotEdges(graph, *tables, plan.scale, edge_table, rows)
    kind = ScalarEdges if query.shape[2] == 1 else AdditiveEdges
    return kind(
        graph,
        workspace.joint_table(query, key, lanes),
        vector[lanes],
        plan.negative_slope,
        None if edge_key is None else edge_key[lanes],
        rows,
    )


class Workspace:
    """Tables of some lanes, [nodes, channels], whose memory serves one group after the other: new
    memory costs more than what is done with it."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def table(self, name: str, tensor: Tensor, lanes: slice) -> Tensor:
        """The rows of all nodes, one lane after the other."""
        rows = tensor[lanes]
        if rows.is_contiguous():
            return rows.flatten(0, 1)
        table = self.new(name, tensor, lanes)
        table.view(rows.shape).copy_(rows)
        return table

    def joint_table(self, query: Tensor, key: Tensor, lanes: slice) -> Tensor:
        """The rows of all targets, then of all sources."""
        parts = query[lanes], key[lanes]
        sizes = [part.shape[0] * part.shape[1] for part in parts]
        table = self._rows_of("joint", query, sum(sizes))
        for rows, part in zip(table.split(sizes), parts, strict=True):
            rows.view(part.shape).copy_(part)
        return table

    def new(self, name: str, like: Tensor, lanes: slice) -> Tensor:
        """A table as large as that of `like`, of no known content."""
        return self._rows_of(name, like, (lanes.stop - lanes.start) * like.shape[1])

    def _rows_of(self, name: str, like: Tensor, num_rows: int) -> Tensor:
        kept = self.kept.get(name)
        if kept is None or len(kept) < num_rows:
            kept = self.kept[name] = like.new_empty(num_rows, like.shape[2])
        return kept[:num_rows]


def features_of(features: Tensor, lanes: slice) -> Tensor:
    """What the edges carry, once for each lane."""
    count = lanes.stop - lanes.start
    return features if count == 1 else features.repeat(count, 1)


def write_scores(
    plan: Plan,
    graph: Adjacency,
    workspace: Workspace,
    lanes: slice,
    tensors: Tensors,
    out: Tensor,
) -> None:
    """The scores of the edges of some lanes, written to `out`."""
    make_scorer(plan, graph, workspace, lanes, tensors).scores(out)
    bias = tensors[-1]
    if bias is not None:
        out += bias[lanes].reshape(-1)


def exponentiate(scores: Tensor, graph: Adjacency) -> Tensor:
    """score_e ← exp(score_e − shift), in place; the shift is common to the edges of a target.

    Returns what their sums are divided by, [targets, 1]: Σ_e exp(score_e − shift), or 1 where that
    is 0, of a target that has no edges, or only edges whose score is −∞.
    """
    low, high = (float(bound) for bound in scores.aminmax())
    if high - low <= SPREAD:
        scores.sub_(high).exp_()  # one number does for all targets, at less cost
    else:
        offsets = graph.offsets.long()
        largest = torch.segment_reduce(scores, "max", offsets=offsets, initial=-torch.inf)
        largest.masked_fill_(largest == -torch.inf, 0.0)  # −∞ − −∞ would be NaN
        scores.sub_(largest.index_select(0, graph.target)).exp_()
    totals = sum_weights(graph, scores)
    return totals.masked_fill_(totals == 0, 1.0)
