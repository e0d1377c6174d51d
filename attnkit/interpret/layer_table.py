"""What each layer and head of attention did at the tokens that the answer is read from."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnkit.interpret.methods.flow import Step
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
        table = [["layer", "head", "entropy", "largest receiver", "prefix"]]
        for layer, head, entropy, receiver, share, prefix in self:
            numbers = f"{entropy:.3f}", f"{share:.3f} at {receiver}", f"{prefix:.3f}"
            table.append([layer or "(itself)", str(head), *numbers])
        return text_table(table, num_left=5)


def layer_table(chain: Chain) -> LayerTable:
    """A row for each head of each layer that was used.

    Of the queries that are read, at most `MOST_ROWS`, evenly spaced, so that the table costs little
    where a model averages thousands of patches.
    """
    table = LayerTable()
    for step, read in zip(chain.steps, chain.rows_read(), strict=True):
        if not step.is_used:
            continue
        received, entropies = head_by_head(step, read)
        received = received.mean(dim=0)  # [heads, tokens]
        shares, receivers = received.max(dim=-1)
        prefix = chain.grid.others(received).sum(dim=-1)
        columns = entropies.mean(dim=0), receivers, shares, prefix
        for head, numbers in enumerate(zip(*map(Tensor.tolist, columns), strict=True)):
            table.append(LayerRow(step.call.layer, head, *numbers))
    return table


def head_by_head(
    step: Step, read: Annotated[Tensor, "batch queries"]
) -> tuple[Annotated[Tensor, "batch heads tokens"], Annotated[Tensor, "batch heads"]]:
    """What each head gives each token, the mean over the queries that are read, and the entropy,
    −Σ a log a / log(keys), in float64; of the queries at most `MOST_ROWS`."""
    num_keys = step.call.num_keys
    queries = read.any(dim=0).nonzero()[:, 0]
    chosen = torch.linspace(0, len(queries) - 1, min(MOST_ROWS, len(queries))).round().long()
    weights = step.call.weights(rows=queries[chosen.to(queries.device)]).double()
    entropies = torch.special.entr(weights).sum(dim=-1).mean(dim=2) / math.log(max(2, num_keys))
    # keys are the last of the tokens, where there are fewer
    return F.pad(weights.mean(dim=2), (step.num_tokens - num_keys, 0)), entropies


def text_table(rows: Iterable[Sequence[object]], num_left: int = 1) -> str:
    """Rows of cells as lines, the columns two spaces apart.

    Args:
        rows: the heading first, all of the same length.
        num_left: how many columns, from the first on, stand at the left; the others at the right.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
