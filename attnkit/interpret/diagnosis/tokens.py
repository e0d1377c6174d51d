"""What each head of one attention over dense tokens does, in blocks of rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnkit.core.capture.calls import AttentionCall
from attnkit.interpret.diagnosis.divergence import divergence_of_heads, entropy, static_score
from attnkit.interpret.diagnosis.sampling import Means, Sampling

BLOCK_ELEMENTS = 2**21  # weights held at once, of which a measure holds a copy or two

HIDDEN = -1e8
"""A bias as low as this hides a key: models write such masks, -inf, or the least of the dtype."""


def measure_tokens(
    call: AttentionCall,
    sampling: Sampling,
    *,
    num_prefix_tokens: int | None = None,
    grid: tuple[int, int] | None = None,
    real: Tensor | None = None,
) -> dict[str, Tensor]:
    """For each name of a measure its value per head; those that have no meaning are left out.

    Args:
        num_prefix_tokens: keys before the first patch; None: not known.
        grid: rows and columns of the keys after the prefix; None: they form none.
        real: [batch, keys], False for padding; None: there is none.
    """
    batch, num_heads = call.query.shape[:2]
    device = call.query.device
    rows = sampling.choose(sampling.rows, call.num_queries, device)
    prefix = num_prefix_tokens or 0
    means = Means()
    received = torch.zeros(batch, num_heads, call.num_keys, device=device)
    num_rows = torch.zeros(batch, num_heads, 1, device=device)
    for block, weights, is_row in _blocks(call, rows, real):
        received += weights.sum(dim=2)
        num_rows += is_row.sum(dim=2, keepdim=True)
        seen = _keys_seen(call, block)
        counted = is_row & (seen > 1)
        normalised = entropy(weights) / seen.clamp(min=2).log()
        means.add("entropy", (normalised * counted).sum((0, 2)), counted.sum((0, 2)))
        if grid is not None and call.is_self:
            between = _distances(block, prefix, grid)
            is_patch = block >= prefix
            on_patches = weights[..., prefix:].sum(dim=3)[:, :, is_patch]
            means.add("distance", (weights * between).sum((0, 2, 3)), on_patches.sum((0, 2)))
    shares = received / num_rows.clamp(min=1)  # of each key, [batch, heads, keys]
    found = {"sink": shares.amax(dim=2).mean(dim=0)}
    if num_prefix_tokens is not None:
        found["prefix"] = shares[:, :, :prefix].sum(dim=2).mean(dim=0)
    if real is not None:
        found["padding"] = (shares * ~real[:, None]).sum(dim=2).mean(dim=0)

    if not sampling.compared:
        return found | means.found()
    # what compares heads, and queries, on a few rows
    few = sampling.choose(sampling.compared, call.num_queries, device)
    keys = sampling.choose(sampling.keys, call.num_keys, device)
    for _, weights, is_row in _blocks(call, few, real, block_elements=None):
        if num_heads > 1:
            found["divergence"] = divergence_of_heads(weights, is_row)
        score, count = static_score(weights[..., keys])
        means.add("static", (score * count).sum(dim=0), count.sum(dim=0))
    return found | means.found()


def _blocks(
    call: AttentionCall,
    rows: Tensor,
    real: Tensor | None,
    block_elements: int | None = BLOCK_ELEMENTS,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows, their weights, and which of them look somewhere and are not padding."""
    per_row = max(1, call.query.shape[0] * call.num_heads * call.num_keys)
    size = len(rows) if block_elements is None else max(1, block_elements // per_row)
    for block in rows.split(size):
        weights = call.weights(rows=block)
        is_row = weights.sum(dim=3) > 0
        if real is not None and call.is_self:
            is_row &= real[:, None, block]
        if not is_row.all():
            weights = weights * is_row[..., None]
        yield block, weights, is_row


def _keys_seen(call: AttentionCall, rows: Tensor) -> Tensor:
    """How many keys each row may see, broadcastable to [batch, heads, rows]."""
    inputs, device = call.inputs, rows.device
    batch, num_heads = call.query.shape[:2]
    seen = None
    if inputs.mask is not None:
        items, heads = torch.arange(batch, device=device), torch.arange(num_heads, device=device)
        seen = inputs.mask.select(items, heads, rows, call.num_queries, call.num_keys)
    if inputs.bias is not None:
        bias = inputs.bias if inputs.bias.shape[2] == 1 else inputs.bias[:, :, rows]
        is_seen = bias > max(torch.finfo(bias.dtype).min / 2, HIDDEN)
        seen = is_seen if seen is None else seen & is_seen
    if seen is None:
        return torch.full((1, 1, 1), call.num_keys, device=device)
    return seen.expand(*seen.shape[:3], call.num_keys).sum(dim=3)


def _distances(rows: Tensor, prefix: int, grid: tuple[int, int]) -> Tensor:
    """From some tokens to all in patches, 0 from and to the prefix, [rows, tokens]."""
    height, width = grid
    token = torch.arange(prefix + height * width, device=rows.device)
    places = torch.stack([(token - prefix) // width, (token - prefix) % width], dim=1).float()
    is_patch = token >= prefix
    return torch.cdist(places[rows], places) * (is_patch[rows, None] & is_patch)
