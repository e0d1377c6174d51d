"""Edges: along which a graph model passes messages to a node."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnkit.core.arguments import at_least
from attnkit.interpret.graphs.fidelity import EdgeFidelity, fidelity_of
from attnkit.interpret.graphs.picture import (
    MOST_RANKED,
    draw_fidelity,
    draw_graph,
    ego_graph,
    empty_figure,
)
from attnkit.interpret.graphs.question import GraphQuestion, steps_to
from attnkit.interpret.methods.question import looking
from attnkit.interpret.text_table import text_table
from attnkit.interpret.units.unit import Unit
from attnkit.lightning.console import in_picture

if TYPE_CHECKING:
    from attnkit.interpret.explanation import Explanation


class EdgeRow(NamedTuple):
    """An edge: its ends, its number, what part that is of the sum of sizes, and how many steps it
    takes from its source to the node, or the nearer one of a pair, along the shortest way (1: a
    neighbour); None of a graph."""

    source: int
    target: int
    score: float
    share: float
    steps: int | None


class EdgeTable(list[EdgeRow]):
    """A list of `EdgeRow`, which is printed as a table."""

    def __repr__(self) -> str:
        rows = [["edge", "score", "share", "steps"]]
        for source, target, score, share, steps in self:
            numbers = f"{score:.4g}", f"{share:.0%}", "" if steps is None else str(steps)
            rows.append([f"{source} → {target}", *numbers])
        return text_table(rows, num_left=4)


class Edges(Unit):
    """The edges of a graph, in the caller's order.

    Attributes:
        values: [edges]; 0 where an edge cannot reach the node.
        share: what the self-loops that layers added took.
    """

    name = "edge"
    target: GraphQuestion

    def __init__(self, target: GraphQuestion, found: Tensor) -> None:
        super().__init__(target, found[:-1])
        loops, total = found[-1].abs(), found.abs().sum()
        self.share = torch.where(total > 0, loops / total, torch.zeros_like(total))

    def trust(self, seen: Explanation, **options: Any) -> EdgeFidelity:
        """Fidelity beside random edges."""
        with looking(self.target.model), torch.no_grad():
            return fidelity_of(self.target, self.values, **options)

    def top(self, k: int) -> EdgeTable:
        """The k edges that rank first, of those that can reach the node."""
        at_least(1, k=k)
        index, edge_index = self.target.index, self.target.edge_index
        places = self.target.candidates.nonzero()[:, 0]
        places = places[self.values[places].argsort(descending=True, stable=True)][:k]
        steps = steps_to(index, edge_index)
        return EdgeTable(
            EdgeRow(
                source,
                target,
                score,
                self.part(score),
                None if index is None else int(steps[source]),
            )
            for source, target, score in zip(
                *edge_index[:, places].tolist(), self.values[places].tolist(), strict=True
            )
        )

    def part(self, score: float) -> float:
        """What part of the sum of sizes a number is, with what self-loops took; 0 of nothing."""
        assert self.share is not None
        share, total = float(self.share), float(self.values.abs().sum())
        return abs(score) * (1 - share) / total if total else 0.0

    def classes(self, labels: Tensor | None = None) -> list[int]:
        """What colours the nodes: labels, or what the model predicts; empty: nothing.

        Raises:
            ValueError: labels not one a node.
        """
        is_class = isinstance(self.target.index, int) and self.target.of == "probability"
        if labels is None and not is_class:
            return []
        if labels is None:
            with looking(self.target.model), torch.no_grad():
                return self.target.answers().argmax(dim=1).tolist()
        number = int(self.target.edge_index.max()) + 1
        if labels.ndim != 1 or len(labels) < number or labels.is_floating_point():
            raise ValueError(
                f"labels: expected a class for each of at least {number} nodes, got "
                f"{list(labels.shape)}, {labels.dtype}"
            )
        return labels.tolist()

    def arrays(self) -> dict[str, Tensor]:
        """The values, the edges, and which of them can reach the node."""
        edge_index, candidates = self.target.edge_index, self.target.candidates
        return {"edges": self.values, "edge_index": edge_index, "candidates": candidates}

    def draw(
        self,
        seen: Explanation,
        *,
        labels: Annotated[Tensor, "nodes", int] | None = None,
        class_names: Sequence[str] = (),
        fidelity: EdgeFidelity | None = None,
        most: int = MOST_RANKED,
    ) -> Figure:
        """The node, which a ring marks, and the edges that rank first by size.

        They are as wide as their number over the largest, which the scale says; other edges between
        the same nodes are grey. Beside it is fidelity over k, with random edges.

        Args:
            labels: the nodes' classes, which colour them; −1 where one is not known. None: those
                that the model predicts.
            class_names: None of them: their numbers.
            fidelity: `seen.fidelity()`, where it is there already; it is computed otherwise.
            most: how many edges are drawn as wide as their value.

        Raises:
            ValueError: labels not one a node; `most` below 1.
        """
        at_least(1, most=most)
        asked = self.target
        ego = ego_graph(self.values, asked.edge_index, asked.candidates, asked.index, most)
        if fidelity is None and int(asked.candidates.sum()) > 1:
            fidelity = self.trust(seen)
        figure = empty_figure(7.5 if fidelity is None else 10.5, 6.4)
        if fidelity is None:
            graph = figure.subplots()
        else:
            panels = figure.subplot_mosaic("gp;gm", width_ratios=[2.2, 1])
            graph = panels["g"]
            draw_fidelity([panels["p"], panels["m"]], fidelity, str(fidelity.target))
            sentence = in_picture(textwrap.fill(str(fidelity), 150))
            figure.supxlabel(sentence, x=0.01, ha="left", fontsize=9)
        title = in_picture(self.headline(seen, class_names))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        draw_graph(
            graph,
            ego,
            self.classes(labels),
            class_names,
            method=f"{seen.method} of an edge",
            classes_are="class, as predicted" if labels is None else "class",
        )
        return figure

    def headline(self, seen: Explanation, class_names: Sequence[str] = ()) -> str:
        """What was asked and what the model said, in a line."""

        def name(one: int) -> str:
            return class_names[one] if one < len(class_names) else str(one)

        target, predicted, nodes = int(seen.target), int(seen.predicted), self.target.nodes
        where = ("the graph", "node {}", "the pair {}, {}")[len(nodes)].format(*nodes)
        model = "predicted" if target == predicted else f"predicted {name(predicted)}"
        what = f"class {name(target)} ({model})"
        if len(nodes) == 2 or self.target.of != "probability":  # one of several that may all be so
            what = name(target)
        return (
            f"{seen.method} of {where}: {what}, {seen.quantity.symbol} = "
            f"{float(seen.probability):.3f}"
        )

    def lines(self, seen: Explanation) -> list[str]:
        """The headline, the first edges, and what loops took."""
        lines = [self.headline(seen), *(f"  {line}" for line in repr(seen.top()).splitlines())]
        if self.share:
            lines.append(f"Self-loops that layers added took {float(self.share):.0%}.")
        return [*lines, *seen.notes]
