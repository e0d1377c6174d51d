"""Measures of the attention weights of each head, over dense tokens or over edges."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from attnkit.core.capture.calls import AttentionCall, EdgeCall
from attnkit.interpret.methods.grid import Grid

BLOCK_ELEMENTS = 2**21  # weights in memory at once; a measure makes one or two copies of them

HIDDEN = -1e8
"""A bias at or below this hides a key: models mask with such numbers, -inf or the dtype's min."""

TIE = 1e-4
"""Weights whose difference is a smaller share of the larger one tie; rounding decides their order.
"""

MAX_FANOUT = 16  # targets of one source that are paired in the search for shared sources

ByHead = dict[str, Annotated[Tensor, "heads"]]
"""The value per head by the name of the measure; measures without a meaning are left out."""


@dataclass(frozen=True)
class Sampling:
    """Numbers of queries, keys and pairs that are drawn, with a fixed seed, if there are more.

    rows: queries for entropy, sink, shares and distance.
    compared: queries for the comparison of queries and of heads; 0: no comparison.
    keys: keys that are ranked.
    pairs: pairs of nodes of a graph that are compared; 0: none.
    """

    rows: int = 128
    compared: int = 16
    keys: int = 48
    pairs: int = 256
    seed: int = 0

    def choose(self, count: int, size: int, device: torch.device) -> Tensor:
        """Draw `count` of the numbers below `size`, ascending; all of them if there are no more."""
        if size <= count:
            return torch.arange(size, device=device)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(size, generator=generator)[:count].sort().values.to(device)


def entropy(weights: Annotated[Tensor, "*batch keys"]) -> Annotated[Tensor, "*batch"]:
    """Return the entropy −Σ_j w_j ln w_j of each row, in nats."""
    return -_terms(weights).sum(dim=-1)


def divergence_of_heads(
    weights: Annotated[Tensor, "heads *keys"],
    is_row: Annotated[Tensor, "heads *rows", bool],
    entropy: Callable[[Tensor], Tensor] = entropy,
) -> Annotated[Tensor, "heads"]:
    """Return the mean Jensen–Shannon divergence of each head's rows from those of the other heads.

        JS(p, q) = H((p + q) / 2) − (H(p) + H(q)) / 2    in bits: 0 equal, 1 no key in common

    Args:
        weights: weights of at least two heads.
        is_row: which rows count.
        entropy: function from weights [heads, *keys] to the entropy of each row [heads, *rows].
    """
    num_heads = len(weights)
    own = entropy(weights)
    total = own.new_zeros(num_heads)
    for head in range(num_heads - 1):
        others = slice(head + 1, None)
        mixed = entropy((weights[head] + weights[others]) / 2)
        counted = (is_row[head] & is_row[others]).flatten(1)
        divergence = (mixed - (own[head] + own[others]) / 2).flatten(1)
        means = (divergence * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        total[head] += means.sum()
        total[others] += means
    return (total / (num_heads - 1) / math.log(2)).clamp(min=0)


def static_score(
    weights: Annotated[Tensor, "*batch queries keys"],
) -> tuple[Annotated[Tensor, "*batch"], Annotated[Tensor, "*batch"]]:
    """Return the mean Kendall τ between the queries' rankings of the keys that both see.

        τ = (concordant − discordant) / (concordant + discordant)

    over the pairs of keys. A pair that ties in either ranking, or with a key without weight, does
    not count. The signs of all differences form a vector for each query, and the product of two
    such vectors is concordant minus discordant.

    A score of 1 means that all queries rank the keys alike, so that attention cannot depend on the
    query, as in GAT (Brody et al., How Attentive are Graph Attention Networks?, 2022, theorem 1).

    Returns:
        τ, or 0 if nothing can be ranked; and the number of pairs of queries in the mean.
    """
    num_keys = weights.shape[-1]
    one, other = torch.triu_indices(num_keys, num_keys, 1, device=weights.device)
    first, second = weights[..., one], weights[..., other]
    larger, smaller = torch.maximum(first, second), torch.minimum(first, second)
    counted = ((smaller > 0) & (larger - smaller > TIE * larger)).to(weights.dtype)
    signs = (first - second).sign() * counted
    agreement = signs @ signs.transpose(-1, -2)
    pairs = counted @ counted.transpose(-1, -2)
    is_pair = torch.triu(torch.ones_like(pairs), 1) * (pairs > 0)
    count = is_pair.sum((-1, -2))
    taus = (agreement / pairs.clamp(min=1) * is_pair).sum((-1, -2))
    return taus / count.clamp(min=1), count


def _terms(weights: Tensor) -> Tensor:
    """Return w ln w, which is 0 if w is 0."""
    tiny = torch.finfo(weights.dtype).tiny
    return weights.clamp(min=tiny).log_().mul_(weights)


# --- dense tokens ---------------------------------------------------------------------------------


def measure_tokens(
    call: AttentionCall,
    sampling: Sampling,
    *,
    num_prefix_tokens: int | None = None,
    grid: Grid | None = None,
    real: Annotated[Tensor, "batch keys", bool] | None = None,
) -> ByHead:
    """Return the measures of attention over dense tokens, computed in blocks of rows.

    Args:
        num_prefix_tokens: number of class and register tokens before all others, used without a
            grid; None: not known.
        grid: position of the patches among the keys; None: the keys form no grid.
        real: False for padding; None: no padding.
    """
    batch, num_heads, device = call.query.shape[0], call.num_heads, call.query.device
    received = torch.zeros(batch, num_heads, call.num_keys, device=device)
    num_rows = torch.zeros(batch, num_heads, 1, device=device)
    sums: dict[str, list[tuple[Tensor, Tensor]]] = {}  # for each mean: partial sums and counts
    rows = sampling.choose(sampling.rows, call.num_queries, device)
    for block in rows.split(max(1, BLOCK_ELEMENTS // max(1, batch * num_heads * call.num_keys))):
        weights, is_row = _rows(call, block, real)
        received += weights.sum(dim=2)
        num_rows += is_row.sum(dim=2, keepdim=True)
        seen = _keys_seen(call, block)
        counted = is_row & (seen > 1)
        normalised = entropy(weights) / seen.clamp(min=2).log()
        part = (normalised * counted).sum((0, 2)), counted.sum((0, 2))
        sums.setdefault("entropy", []).append(part)
        if grid is not None and grid.has_queries and call.is_self:
            between, is_between = _distances(block, grid)
            part = (weights * between).sum((0, 2, 3)), (weights * is_between).sum((0, 2, 3))
            sums.setdefault("distance", []).append(part)
    shares = received / num_rows.clamp(min=1)  # mean weight on each key
    found = {"sink": shares.amax(dim=2).mean(dim=0)}
    if grid is not None:
        found["prefix"] = grid.others(shares, dim=2).sum(dim=2).mean(dim=0)
    elif num_prefix_tokens is not None:
        found["prefix"] = shares[:, :, :num_prefix_tokens].sum(dim=2).mean(dim=0)
    if real is not None:
        found["padding"] = (shares * ~real[:, None]).sum(dim=2).mean(dim=0)
    if sampling.compared and call.num_queries:  # few rows, which fit in memory together
        weights, is_row = _rows(
            call, sampling.choose(sampling.compared, call.num_queries, device), real
        )
        if num_heads > 1:
            by_head = weights.transpose(0, 1), is_row.transpose(0, 1)
            found["divergence"] = divergence_of_heads(*by_head)
        keys = sampling.choose(sampling.keys, call.num_keys, device)
        score, count = static_score(weights[..., keys])
        sums["static"] = [((score * count).sum(dim=0), count.sum(dim=0))]
    for name, parts in sums.items():
        total, number = (torch.stack(part).sum(dim=0) for part in zip(*parts, strict=True))
        if bool((number > 0).all()):
            found[name] = total / number
    return found


def _rows(call: AttentionCall, rows: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights of some rows, and which rows see a key and are not padding.

    The weights of the other rows are set to 0.
    """
    weights = call.weights(rows=rows)
    is_row = weights.sum(dim=3) > 0
    if real is not None and call.is_self:
        is_row &= real[:, None, rows]
    return (weights if is_row.all() else weights * is_row[..., None]), is_row


def _keys_seen(call: AttentionCall, rows: Tensor) -> Tensor:
    """Return how many keys each row may see, broadcastable to [batch, heads, rows]."""
    inputs, device = call.inputs, rows.device
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if inputs.mask is not None:
        items, heads = (torch.arange(size, device=device) for size in call.query.shape[:2])
        seen = inputs.mask.select(items, heads, rows, call.num_queries, call.num_keys)
    if inputs.bias is not None:
        bias = inputs.bias if inputs.bias.shape[2] == 1 else inputs.bias[:, :, rows]
        seen = seen & (bias > max(torch.finfo(bias.dtype).min / 2, HIDDEN))
    return seen.expand(*seen.shape[:3], call.num_keys).sum(dim=3)


def _distances(rows: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the distances in patches from some tokens to all, and whether both are patches.

    Both are [rows, tokens]; a distance from or to another token is 0.
    """
    patch = torch.arange(grid.num_tokens, device=rows.device) - grid.num_prefix_tokens
    is_patch = (patch >= 0) & (patch < grid.rows * grid.columns)
    places = torch.stack([patch // grid.columns, patch % grid.columns], dim=1).float()
    is_between = is_patch[rows, None] & is_patch
    return torch.cdist(places[rows], places) * is_between, is_between


# --- edges ----------------------------------------------------------------------------------------


def measure_edges(call: EdgeCall, sampling: Sampling) -> tuple[ByHead, ByHead]:
    """Return the measures of attention over edges, and the entropy by the nodes' number of edges.

    A node with one edge always gives it all its attention, so it counts only for the sink.
    """
    used = ~call.is_replaced
    source, target = call.edge_index[:, used].long()
    weights = call.weights[used].float()
    num_sources, num_targets = call.num_nodes

    def by_target(rows: Tensor) -> Tensor:
        return rows.new_zeros(num_targets, *rows.shape[1:]).index_add(0, target, rows)

    degree = by_target(torch.ones_like(target))
    # for one edge type the weights are shares of those of all types, so normalize them
    weights = weights / by_target(weights)[target].clamp(min=torch.finfo(weights.dtype).tiny)
    received = weights.new_zeros(num_sources, call.num_heads).index_add(0, source, weights)
    found = {"sink": received.amax(dim=0) / (degree > 0).sum().clamp(min=1)} if len(source) else {}
    chooses = degree > 1
    if not chooses.any():
        return found, {}
    normalised = -by_target(_terms(weights))[chooses] / degree[chooses, None].log()
    found["entropy"] = normalised.mean(dim=0)
    moved = by_target((weights - 1 / degree[target, None]).abs())
    found["uniform"] = moved[chooses].mean(dim=0) / 2
    if call.num_heads > 1 and sampling.compared:
        few = torch.zeros_like(chooses)
        few[chooses.nonzero()[: sampling.rows, 0]] = True
        theirs = few[target]

        def entropies(weights: Tensor) -> Tensor:
            nothing = weights.new_zeros(len(weights), num_targets)
            return -nothing.index_add(1, target[theirs], _terms(weights))

        is_row = few.expand(call.num_heads, -1)
        found["divergence"] = divergence_of_heads(weights[theirs].T, is_row, entropies)
    if sampling.pairs:
        total, count = _static_of_edges(source, target, weights, sampling)
        if bool((count > 0).all()):
            found["static"] = total / count
    groups = (degree[chooses] - 1).float().log2().floor().long()  # 2, 3–4, 5–8, … edges
    by_degree = {}
    for group in groups.unique().tolist():
        name = f"{2**group + 1}–{2 ** (group + 1)}" if group else "2"
        by_degree[name] = normalised[groups == group].mean(dim=0)
    return found, by_degree


def _static_of_edges(
    source: Tensor, target: Tensor, weights: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of static scores of pairs of targets over shared sources."""
    total, count = torch.zeros_like(weights[0]), torch.zeros_like(weights[0])
    order = target.argsort(stable=True)
    ends = target.bincount().cumsum(0).tolist()
    for pair in _pairs_that_share(source, target, sampling):
        one, other = (order[ends[node - 1] if node else 0 : ends[node]] for node in pair)
        # a repeated edge has several weights; the last one represents it
        first = dict(zip(source[one].tolist(), one.tolist(), strict=True))
        second = zip(source[other].tolist(), other.tolist(), strict=True)
        shared = [(first[node], edge) for node, edge in second if node in first]
        rows = torch.tensor(shared[: sampling.keys], device=source.device)
        tau, number = static_score(weights[rows].permute(2, 1, 0))
        total, count = total + tau * number, count + number
    return total, count


def _pairs_that_share(
    source: Tensor, target: Tensor, sampling: Sampling
) -> Iterator[tuple[int, int]]:
    """Yield some pairs of targets that share at least two sources."""
    edges = torch.stack([source, target]).unique(dim=1)
    generator = torch.Generator().manual_seed(sampling.seed)
    shuffled = edges[:, torch.randperm(edges.shape[1], generator=generator).to(edges.device)]
    source, target = shuffled[:, shuffled[0].argsort(stable=True)]
    size = int(target.max()) + 1
    found = []
    for step in range(1, MAX_FANOUT):
        same = source[step:] == source[:-step]
        one, other = target[step:][same], target[:-step][same]
        found.append(torch.minimum(one, other) * size + torch.maximum(one, other))
    codes, counts = torch.cat(found).unique(return_counts=True)
    codes = codes[counts > 1]
    for code in codes[sampling.choose(sampling.pairs, len(codes), codes.device)].tolist():
        yield divmod(code, size)
