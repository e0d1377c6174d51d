"""Entropies of attention, how far heads are from each other, and whether they read the query."""

from typing import Annotated

import torch
from torch import Tensor

TIE = 1e-4
"""Weights that differ by less than this share of the larger are a tie, which rounding breaks."""


def entropy(weights: Annotated[Tensor, "*batch keys"]) -> Annotated[Tensor, "*batch"]:
    """−Σ_j w_j ln w_j of each row, in nats."""
    return -terms(weights).sum(dim=-1)


def terms(weights: Tensor) -> Tensor:
    """w ln w, 0 where w is."""
    tiny = torch.finfo(weights.dtype).tiny
    return weights.clamp(min=tiny).log_().mul_(weights)


def divergence_of_heads(
    weights: Annotated[Tensor, "batch heads rows keys"],
    is_row: Annotated[Tensor, "batch heads rows", bool],
) -> Annotated[Tensor, "heads"]:
    """The mean Jensen–Shannon divergence of each head's rows from those of the other heads.

    JS(p, q) = H((p + q) / 2) − (H(p) + H(q)) / 2    in bits: 0 the same, 1 no key in common
    """
    num_heads = weights.shape[1]
    own = entropy(weights)
    total = weights.new_zeros(num_heads)
    for head in range(num_heads - 1):
        others = slice(head + 1, None)
        mixed = entropy((weights[:, head, None] + weights[:, others]) / 2)
        divergence = mixed - (own[:, head, None] + own[:, others]) / 2
        counted = is_row[:, head, None] & is_row[:, others]
        means = (divergence * counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)
        total[head] += means.sum()
        total[others] += means
    return (total / (num_heads - 1) / torch.tensor(2.0).log()).clamp(min=0)


def static_score(
    weights: Annotated[Tensor, "*batch queries keys"],
) -> tuple[Annotated[Tensor, "*batch"], Annotated[Tensor, "*batch"]]:
    """The mean Kendall τ of all pairs of queries' rankings of the keys that both see.

        τ = (concordant − discordant) / (concordant + discordant)

    over the pairs of keys; one that is a tie in either ranking, or of which a key has no weight, is
    not counted. The signs of all differences are a vector for each query, and their products are
    concordant minus discordant.

    1: all queries rank the keys alike, so that attention cannot depend on the query, as in GAT
    (Brody et al., How Attentive are Graph Attention Networks?, 2022, theorem 1).

    Returns:
        τ, 0 where nothing can be ranked; and of how many pairs of queries it is the mean.
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
