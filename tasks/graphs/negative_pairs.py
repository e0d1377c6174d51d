"""Pairs of nodes that no edge joins: drawn uniformly, or given with held-out edges."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.core.operators.sparse import ranges
from attnkit.lightning.errors import UserError


class AbsentPairs:
    """The ordered pairs of different nodes that no edge joins; `len` counts them.

    A pair (i, j) has the number i · nodes + j, and absent pairs have places from 0 on in this
    order. A random place thus gives every pair with the same probability, and no draw has to be
    repeated, however dense the graph is. PyG's `negative_sampling` draws from the same pairs, but
    with the process's generators, and repeats draws.

    Args:
        edge_index: [2, edges], source in row 0, target in row 1; both directions for an undirected
            graph.
        num_nodes: number of nodes.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        nodes = torch.arange(num_nodes)
        source, target = edge_index.long()
        self.present = torch.cat([source * num_nodes + target, nodes * (num_nodes + 1)]).unique()
        """Sorted numbers of all other pairs: edges, and each node with itself."""
        self._before = self.present - torch.arange(len(self.present))  # absent pairs before each
        rows = torch.arange(num_nodes + 1) * num_nodes
        self._starts = rows - torch.searchsorted(self.present, rows)  # first place of each source

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, places: Tensor) -> Tensor:
        """Return the pairs [2, …] at places, int64 from 0 to `len` − 1."""
        numbers = places + torch.searchsorted(self._before, places, right=True)
        return torch.stack([numbers // self.num_nodes, numbers % self.num_nodes])

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random pairs [2, count], drawn with replacement."""
        return self.at(torch.randint(len(self), (count,), generator=generator))

    def draw_from(self, sources: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return random pairs [2, sources, count] that start at these nodes, with replacement.

        For a node that is joined to all others, the pairs start at any node.
        """
        first, last = self._starts[sources], self._starts[sources + 1]
        joined_to_all = first == last
        first = first.masked_fill(joined_to_all, 0)[:, None]
        width = torch.where(joined_to_all, len(self), last - self._starts[sources])[:, None]
        draws = torch.rand((len(sources), count), dtype=torch.float64, generator=generator)
        return self.at(first + torch.minimum((draws * width).long(), width - 1))


def present_from(present: Tensor, sources: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return those of `AbsentPairs.present` that start at some nodes.

    The result holds the position of each source in `sources`, and the target.
    """
    first, last = torch.searchsorted(present, torch.stack([sources, sources + 1]) * num_nodes)
    rows = torch.arange(len(sources), device=sources.device).repeat_interleave(last - first)
    return rows, present[ranges(first, last - first)] % num_nodes


class HeldOut(NamedTuple):
    """The edges of val or test that the data provides.

    pairs: int64 [2, edges]; one direction of each edge in an undirected graph.
    absent: the pairs among which edges are ranked: [2, absent], the same for all edges; or [2,
        edges, k], k for each edge; None: they are drawn.
    where: the file, for messages.
    """

    pairs: Tensor
    absent: Tensor | None = None
    where: str = "data"

    def check(self, num_nodes: int) -> None:
        """Raise a `UserError` if these are no pairs of nodes below `num_nodes`."""
        for name, given, dims in (
            ("edges", self.pairs, (2,)),
            ("absent pairs", self.absent, (2, 3)),
        ):
            if given is None:
                continue
            if given.dtype != torch.int64 or given.ndim not in dims or len(given) != 2:
                got = f"{given.dtype} {list(given.shape)}"
                raise UserError(f"{self.where}: expected {name}, int64 [2, …], got {got}")
            if not given.numel():
                raise UserError(f"{self.where}: expected {name}, got none")
            low, high = map(int, given.aminmax())
            if low < 0 or high >= num_nodes:
                wrong = low if low < 0 else high
                raise UserError(
                    f"{self.where}: there is no node {wrong} of {name}: expected 0 to "
                    f"{num_nodes - 1}"
                )
        count = self.pairs.shape[1]
        if self.absent is not None and self.absent.ndim == 3 and self.absent.shape[1] != count:
            raise UserError(
                f"{self.where}: expected absent pairs of {count} edges, got {self.absent.shape[1]}"
            )
