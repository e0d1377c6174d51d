"""The paths from a network's input to its output, read from the graph that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from torch import Tensor

Node = tuple[Any, int]
"""A computed tensor: the function of autograd's graph that made it, and the index of the function's
output."""


def node_of(tensor: Tensor) -> Node | None:
    """Return the node of a tensor; None if it was not computed from one with a gradient."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


class Paths:
    """All paths from one node to another.

    A node a *dominates* a node b if every path from the source to b leads through a. The nodes that
    dominate the sink are the *main path*: what follows them depends on earlier nodes only through
    them.

    before: for each node except the source, the nodes it was computed from.
    dominator: for each node except the source, the nearest other node that dominates it (Cooper,
        Harvey and Kennedy 2001, A simple, fast dominance algorithm).
    depth: for each node, the number of other nodes that dominate it.
    main: the main path from the source to the sink; `depth` is the index in it. Empty if the sink
        does not depend on the source.
    """

    def __init__(self, source: Node, sink: Node) -> None:
        self.before: dict[Node, list[Node]] = {}
        self.dominator: dict[Node, Node] = {}
        self.depth = {source: 0}
        for node in _in_order(sink):
            before = [other for other in _inputs(node) if other in self.depth]
            if before and node != source:
                self.before[node] = list(dict.fromkeys(before))
                self.dominator[node] = reduce(self._nearest_common, before)
                self.depth[node] = self.depth[self.dominator[node]] + 1
        self.main = list(self.dominators(sink))[::-1] if sink in self.depth else []

    def dominators(self, node: Node) -> Iterator[Node]:
        """Yield the node, and those that dominate it, the nearest first."""
        yield node
        while node in self.dominator:
            node = self.dominator[node]
            yield node

    def dominates(self, node: Node, other: Node) -> bool:
        """Whether every path to `other` leads through `node`; a node dominates itself."""
        return any(found == node for found in self.dominators(other))

    def _nearest_common(self, one: Node, other: Node) -> Node:
        while one != other:
            if self.depth[one] < self.depth[other]:
                one, other = other, one
            one = self.dominator[one]
        return one


def _inputs(node: Node) -> list[Node]:
    return [(function, index) for function, index in node[0].next_functions if function is not None]


def _in_order(sink: Node) -> Iterator[Node]:
    """Yield every node that the sink depends on, each after its inputs."""
    seen, stack = {sink}, [(sink, iter(_inputs(sink)))]
    while stack:
        node, inputs = stack[-1]
        for found in inputs:
            if found not in seen:
                seen.add(found)
                stack.append((found, iter(_inputs(found))))
                break
        else:
            stack.pop()
            yield node
