"""What each head of one attention over the edges of a graph does."""

import torch
from torch import Tensor

from attnkit.core.capture.calls import EdgeCall
from attnkit.interpret.diagnosis.divergence import static_score, terms
from attnkit.interpret.diagnosis.sampling import Sampling

LOG_2 = 0.6931471805599453
MAX_FANOUT = 16  # targets of one source that are paired in search of shared sources


def measure_edges(
    call: EdgeCall, sampling: Sampling
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For each name of a measure its value per head, and the entropy by the nodes' degree.

    A node of one edge gives it all its attention, whatever the layer: it counts for the sink alone.
    """
    used = ~call.is_replaced
    source, target = call.edge_index[:, used].long()
    weights = call.weights[used].float()
    num_sources, num_targets = call.num_nodes

    def by_target(rows: Tensor) -> Tensor:
        return rows.new_zeros(num_targets, *rows.shape[1:]).index_add(0, target, rows)

    degree = by_target(torch.ones_like(target))
    # of a type of edges, whose weights are shares of those of all types
    weights = weights / by_target(weights)[target].clamp(min=torch.finfo(weights.dtype).tiny)
    received = weights.new_zeros(num_sources, call.num_heads).index_add(0, source, weights)
    found = {"sink": received.amax(dim=0) / (degree > 0).sum().clamp(min=1)} if len(source) else {}
    chooses = degree > 1
    if not chooses.any():
        return found, {}
    entropy = -by_target(terms(weights))
    normalised = entropy[chooses] / degree[chooses, None].log()
    found["entropy"] = normalised.mean(dim=0)
    found["uniform"] = (
        by_target((weights - 1 / degree[target, None]).abs())[chooses].mean(dim=0) / 2
    )
    if call.num_heads > 1 and sampling.compared:
        few = torch.zeros(num_targets, dtype=torch.bool, device=target.device)
        few[chooses.nonzero()[:, 0][: sampling.rows]] = True
        found["divergence"] = _divergence(weights, entropy, target, few)
    taus = _shared(source, target, weights, sampling) if sampling.pairs else None
    if taus is not None:
        found["static"] = taus
    return found, _by_degree(normalised, degree[chooses])


def _by_degree(entropy: Tensor, degree: Tensor) -> dict[str, Tensor]:
    """Mean entropies of nodes of 2, 3–4, 5–8, … edges."""
    groups = (degree - 1).float().log2().floor().long()
    named = {}
    for group in groups.unique().tolist():
        low, high = 2**group + 1, 2 ** (group + 1)
        named[str(high) if low >= high else f"{low}–{high}"] = entropy[groups == group].mean(dim=0)
    return named


def _divergence(weights: Tensor, entropy: Tensor, target: Tensor, few: Tensor) -> Tensor:
    """As `divergence_of_heads`, of some targets."""
    chosen = few[target]
    weights, target, num_heads = weights[chosen], target[chosen], weights.shape[1]
    total = weights.new_zeros(num_heads)
    for head in range(num_heads - 1):
        mixed = terms((weights[:, head, None] + weights[:, head + 1 :]) / 2)
        sums = -mixed.new_zeros(len(entropy), mixed.shape[1]).index_add(0, target, mixed)
        means = (sums - (entropy[:, head, None] + entropy[:, head + 1 :]) / 2)[few].mean(dim=0)
        total[head] += means.sum()
        total[head + 1 :] += means
    return (total / (num_heads - 1) / LOG_2).clamp(min=0)


def _shared(source: Tensor, target: Tensor, weights: Tensor, sampling: Sampling) -> Tensor | None:
    """The static score, of pairs of targets that share sources; None: too few do."""
    pairs = _pairs_that_share(source, target, sampling)
    total, count = weights.new_zeros(weights.shape[1]), weights.new_zeros(weights.shape[1])
    order = target.argsort(stable=True)
    ends = target[order].bincount(minlength=int(target.max()) + 1).cumsum(0)
    for one, other in pairs.tolist():
        first, second = (order[(ends[n - 1] if n else 0) : ends[n]] for n in (one, other))
        # an edge given several times has a weight for each; the last of them stands for all
        places = {int(s): int(e) for s, e in zip(source[first], first, strict=True)}
        both = [
            (places[int(s)], int(e))
            for s, e in zip(source[second], second, strict=True)
            if int(s) in places
        ][: sampling.keys]
        rows = torch.tensor(both, device=source.device)
        tau, number = static_score(weights[rows].permute(2, 1, 0))
        total, count = total + tau * number, count + number
    return total / count if bool((count > 0).all()) else None


def _pairs_that_share(source: Tensor, target: Tensor, sampling: Sampling) -> Tensor:
    """Some pairs of targets that share at least two sources, [pairs, 2]."""
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
    codes = codes[sampling.choose(sampling.pairs, len(codes), codes.device)]
    return torch.stack([codes // size, codes % size], dim=1)
