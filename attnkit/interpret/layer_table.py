"""What each layer and head of attention did at the tokens that the answer is read from."""

import math
from typing import Any, NamedTuple

import torch

from attnkit.interpret.methods.tokens import Chain

MOST_ROWS = 16


class LayerRow(NamedTuple):
    """One head of one layer, the mean over the batch and the queries looked at.

    entropy: −Σ a log a / log(keys): 1 is even, 0 is one key alone.
    receiver, receiver_share: the token that gets most, and how much of the attention that is.
    prefix_share: how much class and register tokens get.
    """

    layer: str
    head: int
    entropy: float
    receiver: int
    receiver_share: float
    prefix_share: float


class LayerTable(list[LayerRow]):
    """A list of `LayerRow`, which is printed as a table."""

    def __repr__(self) -> str:
        rows: list[tuple[Any, ...]] = [("layer", "head", "entropy", "largest receiver", "prefix")]
        rows += [
            (
                row.layer or "(itself)",
                row.head,
                f"{row.entropy:.3f}",
                f"{row.receiver_share:.3f} at {row.receiver}",
                f"{row.prefix_share:.3f}",
            )
            for row in self
        ]
        widths = [max(len(str(row[place])) for row in rows) for place in range(5)]
        return "\n".join(
            "  ".join(f"{cell!s:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def layer_table(chain: Chain) -> LayerTable:
    """A row for each head of each layer that was used.

    Of the queries that are read, at most `MOST_ROWS`, evenly spaced, so that the table costs little
    where a model averages thousands of patches.
    """
    table = LayerTable()
    for step, read in zip(chain.steps, chain.rows_read(), strict=True):
        if not step.is_used:
            continue
        queries = read.any(dim=0).nonzero()[:, 0]
        chosen = torch.linspace(0, len(queries) - 1, min(MOST_ROWS, len(queries))).round().long()
        weights = step.call.weights(rows=queries[chosen.to(queries.device)]).double()
        num_keys = weights.shape[-1]
        entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=(0, 2)) / math.log(
            max(2, num_keys)
        )
        received = weights.mean(dim=(0, 2))  # [heads, keys]
        first = step.num_tokens - num_keys
        share, receiver = received.max(dim=-1)
        prefix = received[:, : max(0, chain.grid.num_prefix_tokens - first)].sum(dim=-1)
        prefix += received[:, num_keys - chain.grid.num_suffix_tokens :].sum(dim=-1)
        for head in range(len(received)):
            table.append(
                LayerRow(
                    step.call.layer,
                    head,
                    float(entropy[head]),
                    first + int(receiver[head]),
                    float(share[head]),
                    float(prefix[head]),
                )
            )
    return table
