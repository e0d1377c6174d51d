"""The edges that rank first, as rows and as a printed table."""

from typing import NamedTuple

import torch
from torch import Tensor


class EdgeRow(NamedTuple):
    """An edge: its ends, its number, what part that is of the sum of sizes, and how many steps it
    takes from its source to the node along the shortest way (1: a neighbour); None of a graph."""

    source: int
    target: int
    score: float
    share: float
    steps: int | None


class EdgeTable(list[EdgeRow]):
    """A list of `EdgeRow`, which is printed as a table."""

    def __repr__(self) -> str:
        rows = [("edge", "score", "share", "steps")]
        rows += [
            (
                f"{row.source} → {row.target}",
                f"{row.score:.4g}",
                f"{row.share:.0%}",
                "" if row.steps is None else str(row.steps),
            )
            for row in self
        ]
        widths = [max(len(row[place]) for row in rows) for place in range(4)]
        return "\n".join(
            "  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def steps_to(index: int, edge_index: Tensor, num_nodes: int) -> Tensor:
    """How many steps lead from each node to one of them along edges, [nodes]; −1: none do."""
    source, target = edge_index
    steps = torch.full((num_nodes,), -1, device=edge_index.device)
    steps[index] = 0
    for step in range(1, num_nodes):
        found = source[steps[target] == step - 1]
        found = found[steps[found] < 0]
        if not len(found):
            break
        steps[found] = step
    return steps
