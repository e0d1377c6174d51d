"""Samples the queries of attention, and averages what is measured."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How many queries are drawn, with a fixed seed, where there are more.

    rows: for entropy, sink, shares and distance.
    compared: for the two measures that compare: queries with each other, and heads; 0: neither.
    keys: that are ranked.
    pairs: of nodes of a graph that are compared; 0: none.
    """

    rows: int = 128
    compared: int = 16
    keys: int = 48
    pairs: int = 256
    seed: int = 0

    def choose(self, count: int, size: int, device: torch.device) -> Tensor:
        """`count` of the numbers below `size`, ascending; all of them if there are no more."""
        if size <= count:
            return torch.arange(size, device=device)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(size, generator=generator)[:count].sort().values.to(device)


class Means:
    """Means per head of what is added in parts."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """A sum and the number of its terms, each [heads]."""
        before, number = self.parts.get(name, (0, 0))
        self.parts[name] = before + total, number + count

    def found(self) -> dict[str, Tensor]:
        """Those of which every head has a term: no mean is 0 / 0."""
        return {
            name: total / count
            for name, (total, count) in self.parts.items()
            if bool((count > 0).all())
        }
