"""A graph network as a sequence of functions, each of which reaches one edge further."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Hops(NamedTuple):
    """The computation of a network, divided at its layers of attention.

        x = before(x)
        x = hop(x, edges)           for each hop
        logits = after(x)

    `before` and `after` treat each node alone, so that any part of a graph can be computed on its
    own: for `Edges` with fewer targets than sources a hop returns the targets, which come first.
    In a network that reads edge features, a hop takes them after the edges.
    """

    before: Callable[[Tensor], Tensor]
    each: Sequence[Callable[..., Tensor]]
    after: Callable[[Tensor], Tensor]
