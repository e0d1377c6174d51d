"""A graph network as a sequence of functions, each of which reaches one edge further."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from attnkit.core.masks.edges import Edges


class Hops(NamedTuple):
    """The computation of a network, divided at its layers of attention.

        x = before(x)
        x = hop(x, edges)           for each hop
        logits = after(x)

    `before` and `after` are of each node alone, so that any part of a graph can be computed on its
    own: for `Edges` with fewer targets than sources a hop gives the first ones.
    """

    before: Callable[[Tensor], Tensor]
    each: Sequence[Callable[[Tensor, Edges], Tensor]]
    after: Callable[[Tensor], Tensor]
